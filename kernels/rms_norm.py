"""RMSNorm, with the residual addition before it fused in on request."""

import torch
import triton
import triton.language as tl

from weir.kernels.checks import check_floats, output_like
from weir.kernels.paged_tile import next_power_of_2

HIDDEN_MAX = 16384


@triton.jit  # type: ignore[untyped-decorator]
def rms_norm_kernel(
    hidden: tl.tensor,
    weight: tl.tensor,
    residual: tl.tensor,  # contiguous like out; unused without HAS_RESIDUAL
    out: tl.tensor,
    hidden_stride: tl.tensor,
    hidden_head_stride: tl.tensor,
    eps: tl.tensor,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
) -> None:
    """One program: one row, held in registers from the one read to the one write."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    source = hidden + (row // HEADS) * hidden_stride + (row % HEADS) * hidden_head_stride
    x = tl.load(source + columns, mask=mask, other=0.0)
    dtype = x.dtype
    x = x.to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual + row * SIZE + columns, mask=mask, other=0.0).to(tl.float32)
        # Normalise what later layers will read back, not the unrounded sum.
        x = x.to(dtype)
        tl.store(residual + row * SIZE + columns, x, mask=mask)
        x = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
    # Rounded before the weight is applied, as Hugging Face's LlamaRMSNorm does.
    normed = (x * inverse).to(dtype).to(tl.float32)
    scale = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + columns, normed * scale, mask=mask)


def rms_norm(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns `x / sqrt(mean(x ** 2) + eps) * weight` over the last dimension, contiguous, in hidden's dtype.

    hidden    [tokens, size] or [tokens, heads, size] (Q and K norms), fp32/fp16/bf16, size <= 16384; strides
              are free except that the last dimension is contiguous. Not modified, unless it is `out`.
    weight    contiguous [size], fp32/fp16/bf16.
    residual  contiguous, of hidden's shape and dtype. When given, x = hidden + residual, and residual is
              overwritten with x; otherwise x = hidden.
    out       contiguous, of hidden's shape and dtype; may be `hidden` itself. Allocated if None.
    """
    size = hidden.shape[-1]
    assert hidden.dim() in (2, 3), f"hidden is {list(hidden.shape)}, not [token, size] or [token, head, size]"
    assert 1 <= size <= HIDDEN_MAX, f"size {size} is not in 1..{HIDDEN_MAX}"
    check_floats("hidden", hidden, hidden.shape)
    check_floats("weight", weight, (size,))
    out = output_like(hidden, out)
    if residual is not None:
        residual = output_like(hidden, residual)
    heads = hidden.shape[1] if hidden.dim() == 3 else 1
    rows = hidden.shape[0] * heads
    if rows == 0:
        return out
    block = next_power_of_2(size)
    # fmt: off
    rms_norm_kernel[(rows,)](
        hidden, weight, out if residual is None else residual, out,
        hidden.stride(0), hidden.stride(1) if hidden.dim() == 3 else 0, eps,
        HEADS=heads, SIZE=size, BLOCK=block, HAS_RESIDUAL=residual is not None,
        num_warps=min(16, max(1, block // 512)))
    # fmt: on
    return out
