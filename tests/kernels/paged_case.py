"""A pool full of NaN, with random K and V exactly where the sequences' positions are."""

from dataclasses import dataclass

import torch

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@dataclass(frozen=True, slots=True)
class PagedCase:
    """What an attention kernel reads, and a generator for what it is asked."""

    pool: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    random: torch.Generator

    def query(self, tokens: int, heads: int, dtype: torch.dtype) -> torch.Tensor:
        """Random [tokens, heads, head_dim], a strided view as of a fused QKV product."""
        fused = torch.randn(tokens, heads + 2, self.pool.shape[5], generator=self.random)
        return fused.to(dtype)[:, 1 : heads + 1]


def paged_case(
    lengths: list[int], kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype, layers: int = 2
) -> PagedCase:
    """Sequences of `lengths` over blocks in shuffled order; whatever no position owns is NaN."""
    random = torch.Generator().manual_seed(hash((*lengths, kv_heads, block_size, head_dim)) % 2**31)
    blocks_of = [-(-length // block_size) for length in lengths]
    count = sum(blocks_of) + 1  # block 0 belongs to nobody
    pool = torch.full((count, layers, 2, kv_heads, block_size, head_dim), float("nan"), dtype=dtype)
    tables = torch.zeros(len(lengths), max(1, *blocks_of) + 1, dtype=torch.int32)
    free = (torch.randperm(count - 1, generator=random) + 1).tolist()
    for seq, length in enumerate(lengths):
        for index in range(blocks_of[seq]):
            block = tables[seq, index] = free.pop()
            owned = min(block_size, length - index * block_size)
            shape = (layers, 2, kv_heads, owned, head_dim)
            pool[int(block), :, :, :, :owned] = torch.randn(shape, generator=random).to(dtype)
    return PagedCase(pool, tables, torch.tensor(lengths, dtype=torch.int32), random)
