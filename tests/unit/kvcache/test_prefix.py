"""Hash chains and the prefix index."""

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.kvcache.prefix import HASH_BYTES, PrefixIndex, block_hashes, chain_seed

SEED = chain_seed(b"f" * 16, b"tenant")
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def name(number: int) -> bytes:
    return number.to_bytes(HASH_BYTES, "big")


def test_only_full_blocks_have_a_hash() -> None:
    tokens = list(range(10))
    assert [len(block_hashes(tokens[:n], 4, SEED)) for n in range(10)] == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert all(len(one) == HASH_BYTES for one in block_hashes(tokens, 4, SEED))


@given(TOKENS, st.integers(1, 5), st.integers(0, 8))
def test_a_chain_can_be_extended(tokens: list[int], block_size: int, blocks: int) -> None:
    whole = block_hashes(tokens, block_size, SEED)
    head = whole[:blocks]
    parent = head[-1] if head else None
    rest = block_hashes(tokens[len(head) * block_size :], block_size, SEED, parent)
    assert head + rest == whole


@given(TOKENS, TOKENS)
def test_equal_hashes_mean_equal_prefixes(first: list[int], second: list[int]) -> None:
    ours, theirs = block_hashes(first, 3, SEED), block_hashes(second, 3, SEED)
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        end = 3 * (index + 1)
        assert (mine == other) == (first[:end] == second[:end])


def test_seed_separates_fingerprints_and_tenants() -> None:
    seeds = {
        chain_seed(b"f" * 16, b""),
        chain_seed(b"g" * 16, b""),
        chain_seed(b"f" * 16, b"a"),
        chain_seed(b"f" * 15, b"fa"),
    }
    assert len(seeds) == 4
    assert len({block_hashes([1, 2], 2, seed)[0] for seed in seeds}) == 4


def test_hashes_are_equal_in_every_process() -> None:
    code = (
        "from weir.kvcache.prefix import block_hashes, chain_seed;"
        "print(block_hashes([1, 2, 3, 4], 2, chain_seed(b'f' * 16, b't'))[1].hex())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert outputs == {block_hashes([1, 2, 3, 4], 2, chain_seed(b"f" * 16, b"t"))[1].hex()}


def test_the_first_block_keeps_a_hash() -> None:
    index = PrefixIndex()
    assert index.put(name(1), 10)
    assert index.put(name(1), 10)
    assert not index.put(name(1), 11)
    assert (index.block_of(name(1)), index.hash_of(10), index.hash_of(11)) == (10, name(1), None)
    with pytest.raises(AssertionError, match="another hash"):
        index.put(name(2), 10)


def test_remove() -> None:
    index = PrefixIndex()
    index.put(name(1), 10)
    assert index.remove(10) == name(1)
    assert index.remove(10) is None
    assert (len(index), list(index), index.block_of(name(1))) == (0, [], None)
