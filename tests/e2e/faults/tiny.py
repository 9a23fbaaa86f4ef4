"""A small random Llama that a whole cluster can serve, and what it must answer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import tokenizers
import torch
import transformers

NAME = "tiny"
VOCAB = 512
CONTEXT = 8192


class TinyLlama:
    """Weights and tokenizer in ``folder``; the same model in transformers says what is right.

    Its weights are wide, so that every token of the context moves the logits: foreign or missing KV shows.
    """

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.folder = folder
        config = transformers.LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT,
            initializer_range=0.3,
            tie_word_embeddings=False,
            bos_token_id=1,
            eos_token_id=2,
        )
        self._model = transformers.LlamaForCausalLM(config).float().eval()
        self._model.save_pretrained(folder)
        words = tokenizers.models.WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0")
        tokenizer = tokenizers.Tokenizer(words)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        tokenizer.save(str(folder / "tokenizer.json"))

    @torch.inference_mode()
    def greedy(self, prompt: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        """The greedy continuation; the end-of-sequence token is like any other."""
        cache = transformers.DynamicCache(config=self._model.config)
        made: list[int] = []
        step = torch.tensor([list(prompt)])
        while len(made) < max_tokens:
            logits = self._model(step, past_key_values=cache, use_cache=True).logits[0, -1]
            made.append(int(logits.argmax()))
            step = torch.tensor([made[-1:]])
        return tuple(made)


def prompt_of(length: int, seed: int) -> list[int]:
    """A prompt without meaning, another for every seed."""
    source = random.Random(f"prompt {seed}")
    return [source.randrange(3, VOCAB) for _ in range(length)]
