"""The gated activation of a Llama MLP: silu(gate) * up."""

import torch
import triton
import triton.language as tl

from weir.kernels.checks import check_floats, output_like

CHUNK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def silu_mul_kernel(
    gate: tl.tensor,
    up: tl.tensor,
    out: tl.tensor,
    gate_stride: tl.tensor,
    up_stride: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One program: BLOCK columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    g = tl.load(gate + row * gate_stride + columns, mask=mask, other=0.0)
    u = tl.load(up + row * up_stride + columns, mask=mask, other=0.0).to(tl.float32)
    wide = g.to(tl.float32)
    activated = (wide * tl.sigmoid(wide)).to(g.dtype).to(tl.float32)
    tl.store(out + row * size + columns, activated * u, mask=mask)


def silu_mul(gate: torch.Tensor, up: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """`silu(gate) * up`, silu in fp32 and rounded to the dtype before the product. Returns [tokens, size].

    gate, up  [tokens, size], fp32/fp16/bf16; rows may be strided (the halves of one gate-up product will do).
    out       contiguous [tokens, size] of the same dtype; may be `gate` or `up` where that is contiguous.
              Allocated if None.
    """
    tokens, size = gate.shape
    check_floats("gate", gate, (tokens, size))
    check_floats("up", up, (tokens, size), gate.dtype)
    out = output_like(gate, out)
    if tokens == 0 or size == 0:
        return out
    silu_mul_kernel[(tokens, triton.cdiv(size, CHUNK))](
        gate, up, out, gate.stride(0), up.stride(0), size, BLOCK=CHUNK, num_warps=4
    )
    return out
