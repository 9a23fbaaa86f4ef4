import pytest
import torch

from tests.kernels.paged_case import TOLERANCE
from weir.kernels import reference
from weir.kernels.silu_mul import silu_mul


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 96, 1024, 1536])
def test_equals_reference(dtype: torch.dtype, size: int) -> None:
    both = (4 * torch.randn(3, 2 * size, generator=torch.Generator().manual_seed(size))).to(dtype)
    gate, up = both.chunk(2, -1)
    actual = silu_mul(gate, up)
    assert actual.is_contiguous()
    torch.testing.assert_close(actual, reference.silu_mul(gate, up), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_in_place() -> None:
    gate, up = torch.full((2, 8), 1.0), torch.full((2, 8), 2.0)
    assert silu_mul(gate, up, out=gate) is gate
    torch.testing.assert_close(gate, torch.full((2, 8), 2.0 * 0.7310586), rtol=1e-6, atol=0.0)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_far_ends_are_exact() -> None:
    gate = torch.tensor([[-200.0, 200.0, 0.0]])
    assert silu_mul(gate, torch.ones(1, 3)).tolist() == [[0.0, 200.0, 0.0]]


def test_refuses_another_size() -> None:
    with pytest.raises(AssertionError, match=r"up is \[1, 4\], not \[1, 8\]"):
        silu_mul(torch.ones(1, 8), torch.ones(1, 4))
