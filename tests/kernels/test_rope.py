import pytest
import torch

from tests.kernels.paged_case import TOLERANCE
from weir.kernels import reference
from weir.kernels.rope import rope


def tables(rotary_dim: int, positions: int = 50) -> tuple[torch.Tensor, torch.Tensor]:
    frequency = 10000.0 ** -(torch.arange(0, rotary_dim, 2) / rotary_dim)
    angles = torch.arange(positions)[:, None] * frequency[None, :]
    return angles.cos(), angles.sin()


def heads(head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Query and key as views of one fused product: 5 tokens, 3 query heads, 1 key head."""
    fused = torch.randn(5, 5, head_dim, generator=torch.Generator().manual_seed(head_dim)).to(dtype)
    return fused[:, :3], fused[:, 3:4]


POSITIONS = torch.tensor([0, 7, 49, 1, 7])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(32, 32), (64, 64), (80, 80), (96, 96), (128, 32), (256, 256)])
@pytest.mark.parametrize("position_dtype", [torch.int32, torch.int64], ids=str)
def test_equals_reference(dtype: torch.dtype, head_dim: int, rotary_dim: int, position_dtype: torch.dtype) -> None:
    query, key = heads(head_dim, dtype)
    expected_query, expected_key = query.clone(), key.clone()
    rope(query, key, POSITIONS.to(position_dtype), *tables(rotary_dim))
    reference.rope(expected_query, expected_key, POSITIONS, *tables(rotary_dim))
    torch.testing.assert_close(query, expected_query, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(key, expected_key, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_position_zero_stays_and_one_turns_by_one_radian() -> None:
    query = torch.zeros(2, 1, 32)
    query[:, 0, 0] = 1.0
    key = query.clone()
    rope(query, key, torch.tensor([0, 1]), *tables(32))
    assert torch.equal(query[0], key[0])
    assert float(query[0, 0, 0]) == 1.0
    torch.testing.assert_close(float(query[1, 0, 0]), 0.5403023, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(float(query[1, 0, 16]), 0.8414710, rtol=1e-6, atol=0.0)


def test_refuses_tables_wider_than_a_head() -> None:
    query, key = heads(32, torch.float32)
    with pytest.raises(AssertionError, match="64 of 32 dimensions"):
        rope(query, key, POSITIONS, *tables(64))
