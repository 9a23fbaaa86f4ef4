import pytest
import torch

from tests.kernels.paged_case import TOLERANCE, paged_case
from weir.kernels import reference
from weir.kernels.paged_decode import choose_splits, paged_decode

LENGTHS = [1, 15, 16, 17, 0, 64, 65, 130]


def check(
    lengths: list[int],
    heads: int,
    kv_heads: int,
    block_size: int,
    head_dim: int,
    dtype: torch.dtype,
    splits: int | None = None,
    pool_dtype: torch.dtype | None = None,
) -> None:
    case = paged_case(lengths, kv_heads, block_size, head_dim, pool_dtype or dtype)
    query = case.query(len(lengths), heads, dtype)
    arguments = (query, case.pool, 1, case.block_tables, case.seq_lens)
    actual = paged_decode(*arguments, scale=head_dim**-0.5, splits=splits)
    expected = reference.paged_decode(*arguments, scale=head_dim**-0.5, splits=splits)
    assert actual.shape == query.shape
    assert actual.dtype == dtype
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("splits", [1, 4])
def test_dtypes_and_splits(dtype: torch.dtype, splits: int) -> None:
    check(LENGTHS, 6, 2, 16, 64, dtype, splits)


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("head_dim", [32, 80, 96, 128, 256])
def test_block_sizes_and_head_dims(block_size: int, head_dim: int) -> None:
    check([3, block_size, block_size + 1], 4, 2, block_size, head_dim, torch.float32)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (9, 3), (8, 1), (20, 1)])
def test_query_groups(heads: int, kv_heads: int) -> None:
    check([5, 40], heads, kv_heads, 16, 32, torch.float32, splits=2)


def test_pool_of_another_dtype() -> None:
    check([5, 40], 4, 2, 16, 64, torch.float32, pool_dtype=torch.float16)


def test_most_splits_with_most_of_them_empty() -> None:
    check([1, 70], 2, 1, 16, 32, torch.float32, splits=32)


def test_no_sequences() -> None:
    case = paged_case([4], 1, 16, 32, torch.float32)
    query = torch.empty(0, 2, 32)
    out = paged_decode(query, case.pool, 0, case.block_tables[:0], case.seq_lens[:0], scale=1.0)
    assert out.shape == (0, 2, 32)


def test_writes_and_returns_out() -> None:
    case = paged_case([4, 9], 1, 16, 32, torch.float32)
    query = case.query(2, 2, torch.float32)
    out = torch.full((2, 2, 32), 7.0)
    assert paged_decode(query, case.pool, 0, case.block_tables, case.seq_lens, scale=0.5, out=out) is out
    torch.testing.assert_close(
        out, reference.paged_decode(query, case.pool, 0, case.block_tables, case.seq_lens, scale=0.5)
    )


@pytest.mark.parametrize(
    ("batch", "kv_heads", "context_max", "multiprocessors", "splits"),
    [
        (1, 8, 8192, 132, 32),  # 33 wanted
        (8, 8, 8192, 132, 4),
        (64, 8, 8192, 132, 1),
        (1, 8, 1024, 132, 4),  # 256 tokens a split at least
        (1, 8, 255, 132, 1),
        (1, 1, 100_000, 132, 32),
        (1, 1, 100_000, 1, 2),
    ],
)
def test_choose_splits(batch: int, kv_heads: int, context_max: int, multiprocessors: int, splits: int) -> None:
    assert choose_splits(batch, kv_heads, context_max, multiprocessors) == splits


def test_refuses_what_would_read_astray() -> None:
    case = paged_case([4], 2, 16, 32, torch.float32)
    query = case.query(1, 4, torch.float32)
    with pytest.raises(AssertionError, match=r"layer 2 is not in 0\.\.1"):
        paged_decode(query, case.pool, 2, case.block_tables, case.seq_lens, scale=1.0)
    with pytest.raises(AssertionError, match="3 heads on 2 KV heads"):
        paged_decode(query[:, :3], case.pool, 0, case.block_tables, case.seq_lens, scale=1.0)
    with pytest.raises(AssertionError, match=r"seq_lens is torch\.int64"):
        paged_decode(query, case.pool, 0, case.block_tables, case.seq_lens.long(), scale=1.0)
    with pytest.raises(AssertionError, match="splits 3 is not a power of two"):
        paged_decode(query, case.pool, 0, case.block_tables, case.seq_lens, scale=1.0, splits=3)
