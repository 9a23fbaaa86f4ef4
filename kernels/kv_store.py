"""Write the K and V of new tokens to their slots in the pool."""

import torch
import triton
import triton.language as tl

from weir.kernels.checks import check_floats, check_ints
from weir.kernels.layout import pool_layout
from weir.kernels.paged_tile import next_power_of_2

TOKEN_ELEMENTS_MAX = 16384


@triton.jit(do_not_specialize=["layer"])  # type: ignore[untyped-decorator]
def kv_store_kernel(
    key: tl.tensor,
    value: tl.tensor,
    pool: tl.tensor,
    slots: tl.tensor,
    layer: tl.tensor,
    key_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_stride: tl.tensor,
    value_head_stride: tl.tensor,
    block_stride: tl.tensor,
    layer_stride: tl.tensor,
    kv_stride: tl.tensor,
    head_stride: tl.tensor,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_E: tl.constexpr,
) -> None:
    """One program: all heads of K and V of one token."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    elements = tl.arange(0, BLOCK_E)
    heads = elements // HEAD_DIM
    dims = elements % HEAD_DIM
    mask = elements < KV_HEADS * HEAD_DIM
    k = tl.load(key + token * key_stride + heads * key_head_stride + dims, mask=mask)
    v = tl.load(value + token * value_stride + heads * value_head_stride + dims, mask=mask)
    place = pool + (slot // BLOCK_SIZE) * block_stride + layer * layer_stride
    place += heads * head_stride + (slot % BLOCK_SIZE) * HEAD_DIM + dims
    tl.store(place, k, mask=mask)
    tl.store(place + kv_stride, v, mask=mask)


def kv_store(key: torch.Tensor, value: torch.Tensor, pool: torch.Tensor, layer: int, slots: torch.Tensor) -> None:
    """Write `key` and `value` into one layer of `pool`, in place.

    key, value  [tokens, kv_heads, head_dim], fp32/fp16/bf16, cast to the pool's dtype; token and
                head strides are free.
    pool        the KV pool (see weir.kernels.layout); kv_heads * head_dim <= 16384.
    layer       which layer of the pool to write.
    slots       int64 [tokens]: block * block_size + offset in the block. Slots must differ from each other; a
                negative one is skipped (padding of a captured graph). The upper bound is not checked.
    """
    layout = pool_layout(pool, layer)
    tokens = key.shape[0]
    check_floats("key", key, (tokens, layout.kv_heads, layout.head_dim))
    check_floats("value", value, key.shape, key.dtype)
    check_ints("slots", slots, (tokens,), torch.int64)
    elements = layout.kv_heads * layout.head_dim
    assert elements <= TOKEN_ELEMENTS_MAX, f"{elements} elements a token, at most {TOKEN_ELEMENTS_MAX}"
    if tokens == 0:
        return
    # fmt: off
    kv_store_kernel[(tokens,)](
        key, value, pool, slots, layer, key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        layout.block_stride, layout.layer_stride, layout.kv_stride, layout.head_stride,
        KV_HEADS=layout.kv_heads, BLOCK_SIZE=layout.block_size, HEAD_DIM=layout.head_dim,
        BLOCK_E=next_power_of_2(elements), num_warps=4 if elements <= 4096 else 8)
    # fmt: on
