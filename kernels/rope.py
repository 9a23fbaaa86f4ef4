"""Rotary position embedding, half-rotation style (GPT-NeoX, Hugging Face Llama)."""

import torch
import triton
import triton.language as tl

from weir.kernels.checks import check_floats, check_ints
from weir.kernels.paged_tile import next_power_of_2

HEAD_DIM_MAX = 256


@triton.jit  # type: ignore[untyped-decorator]
def rotate_heads(
    base: tl.tensor,
    head_stride: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
) -> None:
    """Rotate all heads of one token, in place."""
    heads = tl.arange(0, BLOCK_H)
    dims = tl.arange(0, BLOCK_HALF)
    mask = (heads[:, None] < HEADS) & (dims[None, :] < HALF)
    lower = base + heads[:, None] * head_stride + dims[None, :]
    upper = lower + HALF
    a = tl.load(lower, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(upper, mask=mask, other=0.0).to(tl.float32)
    tl.store(lower, a * cos[None, :] - b * sin[None, :], mask=mask)
    tl.store(upper, b * cos[None, :] + a * sin[None, :], mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def rope_kernel(
    query: tl.tensor,
    key: tl.tensor,
    positions: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    query_stride: tl.tensor,
    query_head_stride: tl.tensor,
    key_stride: tl.tensor,
    key_head_stride: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
) -> None:
    """One program: all query and key heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(positions + token).to(tl.int64) * HALF
    dims = tl.arange(0, BLOCK_HALF)
    c = tl.load(cos + row + dims, mask=dims < HALF, other=0.0).to(tl.float32)
    s = tl.load(sin + row + dims, mask=dims < HALF, other=0.0).to(tl.float32)
    rotate_heads(query + token * query_stride, query_head_stride, c, s, HEADS, HALF, BLOCK_H, BLOCK_HALF)
    rotate_heads(key + token * key_stride, key_head_stride, c, s, KV_HEADS, HALF, BLOCK_KV, BLOCK_HALF)


def rope(query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate `query` and `key` in place by their positions.

    query      [tokens, heads, head_dim], fp32/fp16/bf16, head_dim <= 256; token and head strides are free.
    key        [tokens, kv_heads, head_dim], likewise, of the query's dtype.
    positions  int32 or int64 [tokens], each a row of the tables (not checked).
    cos, sin   contiguous [max_position, rotary_dim / 2], fp32 for exactness: row p holds the angles
               p * frequency[i]; that is half of what Hugging Face keeps, which repeats each row twice. Any
               attention scaling is in the tables. With rotary_dim < head_dim only the first rotary_dim
               elements turn.

    Element i turns with element i + rotary_dim / 2: (a, b) -> (a cos - b sin, b cos + a sin), in fp32.
    """
    tokens, heads, head_dim = query.shape
    half = cos.shape[1]
    check_floats("query", query, query.shape)
    check_floats("key", key, (tokens, key.shape[1], head_dim), query.dtype)
    check_floats("cos", cos, (cos.shape[0], half))
    check_floats("sin", sin, cos.shape, cos.dtype)
    check_ints("positions", positions, (tokens,), torch.int32, torch.int64)
    assert cos.is_contiguous(), "cos is not contiguous"
    assert sin.is_contiguous(), "sin is not contiguous"
    assert 0 < 2 * half <= head_dim <= HEAD_DIM_MAX, f"{2 * half} of {head_dim} dimensions turn, at most 256"
    if tokens == 0:
        return
    block_h, block_half = next_power_of_2(heads), next_power_of_2(half)
    # fmt: off
    rope_kernel[(tokens,)](
        query, key, positions, cos, sin, query.stride(0), query.stride(1), key.stride(0), key.stride(1),
        HEADS=heads, KV_HEADS=key.shape[1], HALF=half,
        BLOCK_H=block_h, BLOCK_KV=next_power_of_2(key.shape[1]), BLOCK_HALF=block_half,
        num_warps=4 if block_h * block_half <= 4096 else 8)
    # fmt: on
