"""A minimal greedy loop over Model and a hand-made pool, so that models are tested without an engine."""

from dataclasses import dataclass, field

import torch

from weir.engine.batch import Batch
from weir.models.llama import Model


@dataclass
class Sequence:
    """A prompt, its blocks, how many of its tokens are in the pool, and what was generated."""

    prompt: list[int]
    blocks: list[int]
    computed: int = 0
    output: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def decoding(self) -> bool:
        return len(self.tokens) - self.computed == 1 and bool(self.output)


def make_pool(model: Model, blocks: int, block_size: int = 16) -> torch.Tensor:
    """Filled with NaN: reading a slot that was never written shows."""
    c = model.config
    return torch.full(
        (blocks, c.num_layers, 2, c.num_kv_heads, block_size, c.head_dim), float("nan"), dtype=model.dtype
    )


def step_batch(sequences: list[Sequence], chunk: int, block_size: int = 16) -> tuple[Batch, list[Sequence]]:
    """The next step of ``sequences``; also gives them in batch order (decodes first)."""
    order = [s for s in sequences if s.decoding] + [s for s in sequences if not s.decoding]
    lens = [min(chunk, len(s.tokens) - s.computed) for s in order]
    ids, positions, slots = [], [], []
    for s, length in zip(order, lens, strict=True):
        for at in range(s.computed, s.computed + length):
            ids.append(s.tokens[at])
            positions.append(at)
            slots.append(s.blocks[at // block_size] * block_size + at % block_size)
    ends = [s.computed + length for s, length in zip(order, lens, strict=True)]
    rows = [i for i, s in enumerate(order) if ends[i] == len(s.tokens)]
    tables = [s.blocks for s in order]
    return Batch(ids, positions, slots, lens, ends, tables, rows, sum(s.decoding for s in order)), order


def generate(
    model: Model, pool: torch.Tensor, sequences: list[Sequence], new_tokens: int, chunk: int = 1 << 20, eos: int = -1
) -> list[list[int]]:
    """Greedy tokens of every sequence, ``new_tokens`` each or up to and including ``eos``."""
    block_size = pool.shape[4]
    live = list(sequences)
    while live:
        batch, order = step_batch(live, chunk, block_size)
        logits = model.forward(batch, pool)
        assert logits.shape == (len(batch.logit_rows), model.config.vocab_size)
        assert logits.dtype == torch.float32
        best = logits.argmax(dim=-1).tolist()
        for s, end in zip(order, batch.context_lens, strict=True):
            s.computed = end
        for row, token in zip(batch.logit_rows, best, strict=True):
            order[row].output.append(token)
        live = [s for s in live if len(s.output) < new_tokens and eos not in s.output[-1:]]
    return [s.output for s in sequences]
