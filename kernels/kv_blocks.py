"""Copy whole KV blocks, all layers at once, between the pool and a contiguous staging buffer."""

import torch
import triton
import triton.language as tl

from weir.kernels.checks import check_floats, check_ints
from weir.kernels.layout import pool_layout

CHUNK_WORDS = 4096


@triton.jit  # type: ignore[untyped-decorator]
def copy_blocks_kernel(
    pool: tl.tensor,
    staging: tl.tensor,
    block_ids: tl.tensor,
    block_words: tl.tensor,
    CHUNK: tl.constexpr,
    TO_POOL: tl.constexpr,
) -> None:
    """One program: one chunk of one block, as 32-bit words, so that one kernel serves every dtype."""
    index = tl.program_id(0).to(tl.int64)
    block = tl.load(block_ids + index).to(tl.int64)
    words = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    mask = words < block_words
    in_pool = pool + block * block_words + words
    in_staging = staging + index * block_words + words
    if TO_POOL:
        tl.store(in_pool, tl.load(in_staging, mask=mask), mask=mask)
    else:
        tl.store(in_staging, tl.load(in_pool, mask=mask), mask=mask)


def _copy_blocks(pool: torch.Tensor, block_ids: torch.Tensor, staging: torch.Tensor, to_pool: bool) -> None:
    layout = pool_layout(pool)
    count = block_ids.shape[0]
    check_ints("block_ids", block_ids, (count,), torch.int32, torch.int64)
    check_floats("staging", staging, (count, *pool.shape[1:]), pool.dtype)
    assert staging.is_contiguous(), "staging is not contiguous"
    if count == 0:
        return
    block_bytes = layout.block_stride * pool.element_size()
    assert block_bytes % 4 == 0, "a block is a whole number of 32-bit words"
    block_words = block_bytes // 4
    copy_blocks_kernel[(count, triton.cdiv(block_words, CHUNK_WORDS))](
        pool.view(torch.int32),
        staging.view(torch.int32),
        block_ids,
        block_words,
        CHUNK=CHUNK_WORDS,
        TO_POOL=to_pool,
        num_warps=4,
    )


def gather_blocks(pool: torch.Tensor, block_ids: torch.Tensor, staging: torch.Tensor) -> torch.Tensor:
    """Copy pool[block_ids[i]] to staging[i], bit for bit; returns `staging`.

    pool       the KV pool (see weir.kernels.layout), any of its dtypes; not modified.
    block_ids  int32 or int64 [n]; may repeat. Not checked against the pool's size.
    staging    contiguous [n, layers, 2, kv_heads, block_size, head_dim] of the pool's dtype.
    """
    _copy_blocks(pool, block_ids, staging, to_pool=False)
    return staging


def scatter_blocks(staging: torch.Tensor, pool: torch.Tensor, block_ids: torch.Tensor) -> None:
    """Copy staging[i] to pool[block_ids[i]], bit for bit; modifies `pool`.

    The arguments are those of `gather_blocks`; block_ids must differ from each other.
    """
    _copy_blocks(pool, block_ids, staging, to_pool=True)
