"""Byte positions against numpy's own idea of the same array."""

import numpy as np
import pytest

from weir.kvcache.layout import KvLayout

SMOLLM2_135M = KvLayout(layers=30, kv_heads=3, head_dim=64, block_size=16, dtype_bytes=4)
SMALL = KvLayout(layers=3, kv_heads=4, head_dim=5, block_size=2, dtype_bytes=2)


def test_sizes_of_the_demo_model() -> None:
    assert SMOLLM2_135M.block_bytes == 737_280
    assert SMOLLM2_135M.bytes_per_token == 46_080
    assert SMOLLM2_135M.shape(7) == (7, 30, 2, 3, 16, 64)


def test_offsets_are_those_of_the_array() -> None:
    array = np.zeros(SMALL.shape(3), dtype=np.int16)
    for block in range(3):
        for layer in range(SMALL.layers):
            for kv in (0, 1):
                for head in range(SMALL.kv_heads):
                    part = array[block, layer, kv, head]
                    expected = part.ctypes.data - array.ctypes.data
                    assert SMALL.offset(block, layer, kv, head) == expected


@pytest.mark.parametrize(("first", "end"), [(0, 1), (1, 3), (3, 4), (0, 4)])
def test_head_slices_cover_just_these_heads(first: int, end: int) -> None:
    block = np.zeros(SMALL.shape(1), dtype=np.int16)
    flat = block.reshape(-1).view(np.uint8)
    for offset, length in SMALL.head_slices(first, end):
        flat[offset : offset + length] += 1
    expected = np.zeros_like(block).view(np.uint8)
    expected[:, :, :, first:end] = 1
    assert (block.view(np.uint8) == expected).all()


def test_all_heads_are_one_slice() -> None:
    assert SMALL.head_slices(0, 4) == [(0, SMALL.block_bytes)]
    assert len(SMALL.head_slices(0, 2)) == SMALL.layers * 2


def test_blocks_for() -> None:
    assert [SMOLLM2_135M.blocks_for(n) for n in (0, 1, 16, 17, 48)] == [0, 1, 1, 2, 3]
