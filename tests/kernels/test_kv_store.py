import pytest
import torch

from weir.kernels import reference
from weir.kernels.kv_store import kv_store

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pool_dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kv_heads", "block_size", "head_dim"), [(1, 16, 32), (3, 64, 64), (2, 16, 80)])
def test_equals_reference(
    dtype: torch.dtype, pool_dtype: torch.dtype, kv_heads: int, block_size: int, head_dim: int
) -> None:
    random = torch.Generator().manual_seed(kv_heads)
    fused = torch.randn(7, 2 * kv_heads + 1, head_dim, generator=random).to(dtype)
    key, value = fused[:, :kv_heads], fused[:, kv_heads + 1 :]
    actual = torch.full((4, 3, 2, kv_heads, block_size, head_dim), 9.0, dtype=pool_dtype)
    expected = actual.clone()
    slots = torch.randperm(4 * block_size, generator=random)[:7]
    slots[2] = -1
    kv_store(key, value, actual, 1, slots)
    reference.kv_store(key, value, expected, 1, slots)
    assert torch.equal(actual, expected)
    assert int(actual.ne(9.0).sum()) == 6 * 2 * kv_heads * head_dim


def test_lands_where_the_slot_says() -> None:
    pool = torch.zeros(3, 2, 2, 2, 16, 32)
    key, value = torch.full((1, 2, 32), 1.0), torch.full((1, 2, 32), 2.0)
    kv_store(key, value, pool, 1, torch.tensor([2 * 16 + 5]))
    assert bool(pool[2, 1, 0, :, 5].eq(1.0).all())
    assert bool(pool[2, 1, 1, :, 5].eq(2.0).all())
    assert float(pool.sum()) == 2 * 32 * (1.0 + 2.0)


def test_no_tokens() -> None:
    pool = torch.zeros(1, 1, 2, 1, 16, 32)
    nothing = torch.empty(0, 1, 32)
    kv_store(nothing, nothing, pool, 0, torch.empty(0, dtype=torch.int64))
    assert not pool.any()


def test_refuses_what_would_write_astray() -> None:
    pool = torch.zeros(1, 1, 2, 1, 16, 32)
    key = torch.zeros(2, 1, 32)
    with pytest.raises(AssertionError, match=r"slots is torch\.int32"):
        kv_store(key, key, pool, 0, torch.zeros(2, dtype=torch.int32))
    with pytest.raises(AssertionError, match=r"slots is \[3\], not \[2\]"):
        kv_store(key, key, pool, 0, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(AssertionError, match=r"key is \[2, 2, 16\], not \[2, 1, 32\]"):
        kv_store(key.view(2, 2, 16), key, pool, 0, torch.zeros(2, dtype=torch.int64))
    with pytest.raises(AssertionError, match="not one contiguous span"):
        kv_store(key, key, pool.transpose(4, 5).contiguous().transpose(4, 5), 0, torch.zeros(2, dtype=torch.int64))
