"""The shape of the KV pool, as every kernel that touches it sees it.

    pool[block, layer, kv (0 = K, 1 = V), kv_head, token, head_dim]

The pool is one contiguous tensor, so the strides follow from the shape and a block is one contiguous span.
"""

from typing import NamedTuple

import torch

from weir.kernels.checks import FLOAT_DTYPES, check_floats, check_ints

BLOCK_SIZES = (16, 32, 64, 128)
HEAD_DIMS = range(16, 257, 8)


class PoolLayout(NamedTuple):
    """Sizes of a KV pool and the strides between its parts, in elements."""

    num_blocks: int
    num_layers: int
    kv_heads: int
    block_size: int
    head_dim: int

    @property
    def head_stride(self) -> int:
        return self.block_size * self.head_dim

    @property
    def kv_stride(self) -> int:
        """From a head's K to the same head's V."""
        return self.kv_heads * self.head_stride

    @property
    def layer_stride(self) -> int:
        return 2 * self.kv_stride

    @property
    def block_stride(self) -> int:
        return self.num_layers * self.layer_stride


def pool_layout(pool: torch.Tensor, layer: int = 0) -> PoolLayout:
    """The layout of `pool`; asserts that the kernels can address it and that it has `layer`."""
    assert pool.dim() == 6, f"pool is {list(pool.shape)}, not [block, layer, 2, head, token, dim]"
    blocks, layers, kv, heads, block_size, head_dim = pool.shape
    assert kv == 2, f"pool holds {kv} tensors a layer, not K and V"
    assert pool.is_contiguous(), "the pool is not one contiguous span"
    assert pool.dtype in FLOAT_DTYPES, f"pool is {pool.dtype}, not one of {FLOAT_DTYPES}"
    assert block_size in BLOCK_SIZES, f"block size {block_size} is not one of {BLOCK_SIZES}"
    assert head_dim in HEAD_DIMS, f"head_dim {head_dim} is not a multiple of 8 in 16..256"
    assert 0 <= layer < layers, f"layer {layer} is not in 0..{layers - 1}"
    return PoolLayout(blocks, layers, heads, block_size, head_dim)


def check_attention(
    query: torch.Tensor, layout: PoolLayout, block_tables: torch.Tensor, seq_lens: torch.Tensor
) -> None:
    """Assert what both attention kernels require of their arguments."""
    check_floats("query", query, (*query.shape[:2], layout.head_dim))
    assert query.shape[1] % layout.kv_heads == 0, f"{query.shape[1]} heads on {layout.kv_heads} KV heads"
    batch, blocks_max = block_tables.shape
    check_ints("block_tables", block_tables, (batch, blocks_max), torch.int32)
    check_ints("seq_lens", seq_lens, (batch,), torch.int32)
