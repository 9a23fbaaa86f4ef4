import pytest
import torch

from tests.kernels.paged_case import TOLERANCE, paged_case
from weir.kernels import reference
from weir.kernels.paged_decode import paged_decode
from weir.kernels.prefill_attention import prefill_attention, query_tile


def check(
    prefixes: list[int],
    new: list[int],
    heads: int,
    kv_heads: int,
    block_size: int,
    head_dim: int,
    dtype: torch.dtype,
    pool_dtype: torch.dtype | None = None,
) -> None:
    lengths = [prefix + count for prefix, count in zip(prefixes, new, strict=True)]
    case = paged_case(lengths, kv_heads, block_size, head_dim, pool_dtype or dtype)
    query = case.query(sum(new), heads, dtype)
    cu_seqlens = torch.tensor([0, *new]).cumsum(0).int()
    arguments = (query, case.pool, 1, case.block_tables, cu_seqlens, case.seq_lens)
    actual = prefill_attention(*arguments, max_query_len=max(new), scale=head_dim**-0.5)
    expected = reference.prefill_attention(*arguments, max_query_len=max(new), scale=head_dim**-0.5)
    assert actual.shape == query.shape
    assert actual.dtype == dtype
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_cold_cached_and_mixed_batch(dtype: torch.dtype) -> None:
    check([0, 16, 33, 100, 64, 0], [17, 1, 40, 5, 0, 1], 6, 2, 16, 64, dtype)


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("head_dim", [32, 80, 96, 128, 256])
def test_block_sizes_and_head_dims(block_size: int, head_dim: int) -> None:
    check([0, block_size], [block_size + 1, 3], 4, 2, block_size, head_dim, torch.float32)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (9, 3), (8, 1)])
def test_query_groups(heads: int, kv_heads: int) -> None:
    check([0, 21], [30, 7], heads, kv_heads, 16, 32, torch.float32)


@pytest.mark.parametrize("count", [1, 15, 16, 17, 48, 49, 150])
def test_prompt_lengths_around_blocks_and_tiles(count: int) -> None:
    check([0, 64], [count, count], 3, 1, 16, 32, torch.float32)


def test_pool_of_another_dtype() -> None:
    check([0, 21], [30, 7], 4, 2, 16, 64, torch.float32, pool_dtype=torch.bfloat16)


def test_chunks_equal_the_whole() -> None:
    case = paged_case([70], 2, 16, 32, torch.float32)
    query = case.query(70, 4, torch.float32)

    def run(first: int, end: int) -> torch.Tensor:
        bounds = torch.tensor([0, end - first], dtype=torch.int32)
        length = torch.tensor([end], dtype=torch.int32)
        tables = case.block_tables
        return prefill_attention(
            query[first:end], case.pool, 0, tables, bounds, length, max_query_len=end - first, scale=0.2
        )

    chunked = torch.cat([run(0, 32), run(32, 50), run(50, 70)])
    torch.testing.assert_close(chunked, run(0, 70), rtol=2e-6, atol=2e-6)


def test_one_new_token_equals_decode() -> None:
    case = paged_case([70, 3], 2, 16, 32, torch.float32)
    query = case.query(2, 4, torch.float32)
    bounds = torch.tensor([0, 1, 2], dtype=torch.int32)
    actual = prefill_attention(
        query, case.pool, 0, case.block_tables, bounds, case.seq_lens, max_query_len=1, scale=0.2
    )
    expected = paged_decode(query, case.pool, 0, case.block_tables, case.seq_lens, scale=0.2)
    torch.testing.assert_close(actual, expected, rtol=2e-6, atol=2e-6)


def test_padding_rows_of_out_are_left_alone() -> None:
    case = paged_case([5], 1, 16, 32, torch.float32)
    query = case.query(8, 2, torch.float32)
    out = torch.full((8, 2, 32), 7.0)
    bounds = torch.tensor([0, 5], dtype=torch.int32)
    prefill_attention(
        query, case.pool, 0, case.block_tables, bounds, case.seq_lens, max_query_len=8, scale=0.2, out=out
    )
    assert bool(out[:5].ne(7.0).all())
    assert bool(out[5:].eq(7.0).all())


@pytest.mark.parametrize(
    ("rows", "head_dim", "element_bytes", "tile"),
    [
        (4096, 128, 2, (128, 8)),
        (4096, 256, 2, (64, 4)),
        (4096, 64, 4, (32, 4)),
        (4096, 256, 4, (16, 8)),
        (9, 128, 2, (16, 4)),
        (33, 128, 2, (64, 4)),
    ],
)
def test_query_tile(rows: int, head_dim: int, element_bytes: int, tile: tuple[int, int]) -> None:
    assert query_tile(rows, head_dim, element_bytes) == tile
