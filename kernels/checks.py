"""What launchers assert of tensors they are given: a wrong one would make a kernel read or write astray."""

import torch

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_floats(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype | None = None
) -> None:
    """Assert a floating tensor of `shape` and `dtype` (None: any) whose last dimension is contiguous."""
    assert tensor.shape == torch.Size(shape), f"{name} is {list(tensor.shape)}, not {list(shape)}"
    assert tensor.dtype in FLOAT_DTYPES, f"{name} is {tensor.dtype}, not one of {FLOAT_DTYPES}"
    assert dtype in (None, tensor.dtype), f"{name} is {tensor.dtype}, not {dtype}"
    assert tensor.stride(-1) == 1 or tensor.shape[-1] == 1, f"the last dimension of {name} is not contiguous"


def check_ints(name: str, tensor: torch.Tensor, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    """Assert an integer tensor of `shape` and one of `dtypes` whose last dimension is contiguous."""
    assert tensor.shape == torch.Size(shape), f"{name} is {list(tensor.shape)}, not {list(shape)}"
    assert tensor.dtype in dtypes, f"{name} is {tensor.dtype}, not one of {dtypes}"
    assert tensor.stride(-1) == 1 or tensor.shape[-1] == 1, f"the last dimension of {name} is not contiguous"


def output_like(tensor: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """`out`, checked to be contiguous and of `tensor`'s shape and dtype; a new tensor if it is None."""
    if out is None:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    check_floats("out", out, tensor.shape, tensor.dtype)
    assert out.is_contiguous(), "out is not contiguous"
    return out
