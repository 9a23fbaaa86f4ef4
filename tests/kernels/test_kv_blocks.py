import pytest
import torch

from weir.kernels import reference
from weir.kernels.kv_blocks import gather_blocks, scatter_blocks

SHAPES = [(6, 2, 2, 1, 16, 32), (5, 3, 2, 3, 16, 80), (4, 1, 2, 1, 64, 40)]


def random_pool(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])).to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64], ids=str)
def test_equals_reference_and_round_trips(shape: tuple[int, ...], dtype: torch.dtype, id_dtype: torch.dtype) -> None:
    pool = random_pool(shape, dtype)
    block_ids = torch.tensor([3, 0, 2], dtype=id_dtype)
    staging = torch.zeros(3, *shape[1:], dtype=dtype)
    assert gather_blocks(pool, block_ids, staging) is staging
    assert torch.equal(staging, reference.gather_blocks(pool, block_ids, torch.zeros_like(staging)))

    actual, expected = torch.zeros_like(pool), torch.zeros_like(pool)
    scatter_blocks(staging, actual, block_ids)
    reference.scatter_blocks(staging, expected, block_ids)
    assert torch.equal(actual, expected)
    assert torch.equal(actual[[0, 2, 3]], pool[[0, 2, 3]])
    assert not actual[1].any()


def test_copies_bits_of_nan_too() -> None:
    pool = torch.zeros(2, 1, 2, 1, 16, 32, dtype=torch.int16)
    pool[1] = 0x7FC1  # a bfloat16 NaN with a payload
    staging = torch.zeros(1, *pool.shape[1:], dtype=torch.bfloat16)
    gather_blocks(pool.view(torch.bfloat16), torch.tensor([1]), staging)
    assert bool(staging.view(torch.int16).eq(0x7FC1).all())


def test_no_blocks() -> None:
    pool = random_pool(SHAPES[0], torch.float32)
    before = pool.clone()
    nothing = torch.empty(0, *SHAPES[0][1:])
    scatter_blocks(nothing, pool, torch.empty(0, dtype=torch.int64))
    assert torch.equal(pool, before)


def test_refuses_a_staging_buffer_of_the_wrong_size() -> None:
    pool = random_pool(SHAPES[0], torch.float32)
    with pytest.raises(AssertionError, match=r"staging is \[1, .*\], not \[2, "):
        gather_blocks(pool, torch.tensor([1, 2]), torch.empty(1, *SHAPES[0][1:]))
