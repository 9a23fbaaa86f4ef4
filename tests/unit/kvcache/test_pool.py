"""The pool's memory and its guard table."""

import mmap

import pytest
import torch
import xxhash

from weir.errors import InvalidArgument
from weir.kvcache.layout import KvLayout
from weir.kvcache.pool import GuardTable, KvPool, block_checksum
from weir.transfer.ticket import GuardEntry

LAYOUT = KvLayout(layers=2, kv_heads=2, head_dim=4, block_size=4, dtype_bytes=4)


def make_pool(checksums: bool | None = None, populate: bool = True) -> KvPool:
    return KvPool(LAYOUT, 6, torch.float32, checksums=checksums, populate=populate)


@pytest.mark.parametrize("populate", [True, False])
def test_the_tensor_and_the_views_are_the_same_zeroed_memory(populate: bool) -> None:
    pool = make_pool(populate=populate)
    assert pool.data.shape == (6, 2, 2, 2, 4, 4)
    assert pool.data.is_contiguous()
    assert pool.base % mmap.PAGESIZE == 0
    assert pool.guard.base % mmap.PAGESIZE == 0
    assert bool((pool.data == 0).all())
    pool.data[3, 1, 0, 1] = 2.5
    view = pool.block_view(3)
    assert len(view) == LAYOUT.block_bytes == pool.nbytes // 6
    start = LAYOUT.offset(0, 1, 0, 1)
    assert view.cast("f")[start // 4] == 2.5
    view[:] = bytes(len(view))
    assert float(pool.data[3].abs().sum()) == 0.0


def test_seal_publishes_the_checksum_once() -> None:
    pool = make_pool()
    pool.data[2] = 1.0
    pool.seal([2])
    first = xxhash.xxh3_64_intdigest(pool.data[2].numpy().tobytes())
    assert pool.guard.entries([2, 3]) == [GuardEntry(0, first), GuardEntry(0, 0)]
    pool.data[2] = 2.0
    pool.seal([2])
    assert pool.guard.checksum(2) == first
    assert pool.checksums([2]) != [first]
    pool.guard.invalidate(2)
    assert pool.guard.entries([2]) == [GuardEntry(1, 0)]
    pool.seal([2])
    assert pool.guard.entries([2]) == [GuardEntry(1, pool.checksums([2])[0])]


def test_a_checksum_is_never_the_mark_of_an_unsealed_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xxhash, "xxh3_64_intdigest", lambda _: 0)
    assert block_checksum(memoryview(b"x")) == 1


def test_without_checksums_nothing_is_sealed() -> None:
    pool = make_pool(checksums=False)
    pool.seal([0, 1])
    assert pool.guard.entries([0, 1]) == [GuardEntry(0, 0)] * 2


def test_checksums_are_refused_off_the_cpu() -> None:
    with pytest.raises(InvalidArgument, match="checksums"):
        KvPool(LAYOUT, 2, torch.float32, device="meta", checksums=True)


def test_guard_rows_are_little_endian_pairs() -> None:
    guard = GuardTable(3)
    guard.invalidate(1)
    guard.invalidate(1)
    guard.seal(1, 0x0102030405060708)
    assert guard.array.tobytes()[16:32].hex() == "02000000000000000807060504030201"
    assert guard.nbytes == 48
