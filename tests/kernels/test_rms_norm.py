import pytest
import torch

from tests.kernels.paged_case import TOLERANCE
from weir.kernels import reference
from weir.kernels.rms_norm import rms_norm


def random(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [64, 80, 576, 1000])
@pytest.mark.parametrize("fused", [False, True])
def test_equals_reference(dtype: torch.dtype, size: int, fused: bool) -> None:
    hidden, weight = random((5, size), dtype), random((size,), dtype)
    residual = random((6, size), dtype)[:5].contiguous() if fused else None
    other = None if residual is None else residual.clone()
    actual = rms_norm(hidden, weight, 1e-5, residual=residual)
    expected = reference.rms_norm(hidden, weight, 1e-5, residual=other)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    if residual is not None and other is not None:
        assert torch.equal(residual, other)


def test_heads_of_a_strided_view() -> None:
    fused = random((4, 5, 64), torch.float32)
    query, weight = fused[:, 1:4], random((64,), torch.float32)
    actual = rms_norm(query, weight, 1e-6)
    assert actual.is_contiguous()
    torch.testing.assert_close(actual, reference.rms_norm(query, weight, 1e-6), rtol=2e-6, atol=2e-6)


def test_in_place() -> None:
    hidden, weight = random((3, 64), torch.float32), random((64,), torch.float32)
    expected = reference.rms_norm(hidden, weight, 1e-6)
    assert rms_norm(hidden, weight, 1e-6, out=hidden) is hidden
    torch.testing.assert_close(hidden, expected, rtol=2e-6, atol=2e-6)


def test_a_row_of_ones() -> None:
    assert torch.equal(rms_norm(torch.ones(1, 64), torch.full((64,), 3.0), 0.0), torch.full((1, 64), 3.0))


def test_refuses_a_weight_of_another_size() -> None:
    with pytest.raises(AssertionError, match=r"weight is \[32\], not \[64\]"):
        rms_norm(torch.ones(1, 64), torch.ones(32), 1e-6)
