"""A small random Llama in a folder, and what transformers says it generates."""

from pathlib import Path

import tokenizers
import torch
import transformers

VOCAB = 256


def make_tiny_llama(folder: Path) -> transformers.LlamaForCausalLM:
    """Write config, weights and a tokenizer into ``folder``; returns the model, fp32."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.LlamaForCausalLM(config).float().eval()
    model.save_pretrained(folder)
    words = tokenizers.models.WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return model


def greedy_reference(model: transformers.LlamaForCausalLM, prompt: list[int], max_tokens: int) -> list[int]:
    """Greedy continuation, until end-of-sequence or ``max_tokens``."""
    tokens = list(prompt)
    with torch.inference_mode():
        while len(tokens) < len(prompt) + max_tokens:
            logits = model(torch.tensor([tokens])).logits[0, -1]
            tokens.append(int(logits.argmax()))
            if tokens[-1] == model.config.eos_token_id:
                break
    return tokens[len(prompt) :]
