"""Online softmax over tiles of paged KV: the inner loop that decode and prefill attention share."""

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
# Two or three K and V tiles of this size fit in the shared memory of every target (>= 163 KiB).
TILE_BYTES = 16 * 1024


def kv_tile_tokens(head_dim: int, element_bytes: int, tokens_max: int) -> int:
    """How many KV tokens to hold in one tile: a power of two in 16..tokens_max."""
    tokens = TILE_BYTES // (next_power_of_2(head_dim) * element_bytes)
    return max(16, min(tokens_max, tokens))


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n` (n >= 1)."""
    assert n >= 1
    return 1 << (n - 1).bit_length()


@triton.jit  # type: ignore[untyped-decorator]
def attend_range(
    query: tl.tensor,  # [rows, BLOCK_D]
    acc: tl.tensor,  # [rows, BLOCK_D] fp32: sum of p * V
    row_max: tl.tensor,  # [rows] fp32: largest logit so far, in log2 units
    row_sum: tl.tensor,  # [rows] fp32: sum of p
    key_base: tl.tensor,
    value_base: tl.tensor,
    table: tl.tensor,
    lo: tl.tensor,
    hi: tl.tensor,
    visible: tl.tensor,  # [rows]: a row sees the positions below this
    logit_scale: tl.tensor,
    block_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Fold KV positions [lo, hi) into (acc, row_max, row_sum) and return them.

    With MASKED off, hi - lo must be a multiple of BLOCK_N and every row must see all of [lo, hi).
    With MASKED on, every row must have seen a position before, or see `lo`.
    """
    dims = tl.arange(0, BLOCK_D)
    for start in range(lo, hi, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        present = positions < hi
        if MASKED:
            blocks = tl.load(table + positions // BLOCK_SIZE, mask=present, other=0).to(tl.int64)
        else:
            blocks = tl.load(table + positions // BLOCK_SIZE).to(tl.int64)
        tokens = blocks * block_stride + (positions % BLOCK_SIZE) * HEAD_DIM
        offsets = tokens[:, None] + dims[None, :]
        # Absent positions are read as zeros: stale memory may hold NaN, and 0 * NaN would poison the sum.
        if MASKED:
            mask = present[:, None] & (dims[None, :] < HEAD_DIM)
            key = tl.load(key_base + offsets, mask=mask, other=0.0)
            value = tl.load(value_base + offsets, mask=mask, other=0.0)
        elif HEAD_DIM < BLOCK_D:
            mask = dims[None, :] < HEAD_DIM
            key = tl.load(key_base + offsets, mask=mask, other=0.0)
            value = tl.load(value_base + offsets, mask=mask, other=0.0)
        else:
            key = tl.load(key_base + offsets)
            value = tl.load(value_base + offsets)

        # tf32x3 keeps fp32 products to about fp32 accuracy on tensor cores; 16-bit products do not heed it.
        logits = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="tf32x3") * logit_scale
        if MASKED:
            logits = tl.where(positions[None, :] < visible[:, None], logits, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(logits, 1))
        weights = tl.exp2(logits - new_max[:, None])
        decay = tl.exp2(row_max - new_max)
        row_sum = row_sum * decay + tl.sum(weights, 1)
        value = value.to(query.dtype)
        acc = tl.dot(weights.to(value.dtype), value, acc * decay[:, None], input_precision="tf32x3")
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit  # type: ignore[untyped-decorator]
def attend(
    query: tl.tensor,  # [ROWS, BLOCK_D]
    key_base: tl.tensor,  # this layer's and head's K in block 0
    value_base: tl.tensor,
    table: tl.tensor,  # the sequence's row of the block tables
    lo: tl.tensor,
    whole: tl.tensor,
    hi: tl.tensor,
    visible: tl.tensor,
    logit_scale: tl.tensor,
    block_stride: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Attention over positions [lo, hi): (sum of p * V, largest logit in log2 units, sum of p) of each row.

    Every row sees all of [lo, whole), in whole tiles, and of [whole, hi) what is below its `visible`.
    An empty range gives (0, -inf, 0).
    """
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    # fmt: off
    acc, row_max, row_sum = attend_range(
        query, acc, row_max, row_sum, key_base, value_base, table, lo, whole, visible, logit_scale,
        block_stride, BLOCK_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N, False)
    acc, row_max, row_sum = attend_range(
        query, acc, row_max, row_sum, key_base, value_base, table, whole, hi, visible, logit_scale,
        block_stride, BLOCK_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N, True)
    # fmt: on
    return acc, row_max, row_sum
