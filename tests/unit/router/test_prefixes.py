"""Whose cache has the beginning of a prompt."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.router.stage import D1, D2, P1, P2
from weir.kvcache.prefix import block_hashes, chain_seed
from weir.services.router.prefixes import MAX_HASHED_BLOCKS, PrefixMap, PromptKeys

CHAIN = [bytes([number]) * 16 for number in range(40)]


def test_hashes_are_the_workers_and_leave_the_last_token_to_be_computed() -> None:
    prompt = tuple(range(100, 108))
    keys = PromptKeys(prompt, b"salt")
    seed = chain_seed(b"fingerprint", b"salt")
    assert keys.hashes(b"fingerprint", 4) == block_hashes(prompt[:4], 4, seed)
    assert PromptKeys((*prompt, 1), b"salt").hashes(b"fingerprint", 4) == block_hashes(prompt, 4, seed)
    assert keys.hashes(b"fingerprint", 4) is keys.hashes(b"fingerprint", 4)
    assert keys.hashes(b"other", 4) != keys.hashes(b"fingerprint", 4)
    assert PromptKeys(prompt, b"").hashes(b"fingerprint", 4) != keys.hashes(b"fingerprint", 4)
    assert PromptKeys((1,), b"").hashes(b"f", 4) == []
    assert PromptKeys((), b"").hashes(b"f", 4) == []
    assert len(PromptKeys(range(5 * MAX_HASHED_BLOCKS), b"").hashes(b"f", 1)) == MAX_HASHED_BLOCKS


def test_depth_and_holders() -> None:
    known = PrefixMap(1000)
    known.stored(P1, CHAIN[:10])
    known.stored(P2, CHAIN[:4])
    known.stored(D1, CHAIN[:1])
    assert [known.depth(worker, CHAIN) for worker in (P1, P2, D1, D2)] == [10, 4, 1, 0]
    assert known.depth(P1, CHAIN[:3]) == 3
    assert known.depth(P1, CHAIN[20:]) == 0
    assert known.holders(CHAIN, 1) == [P1]
    assert set(known.holders(CHAIN, 9)) == {P1, P2, D1}
    assert known.holders(CHAIN[20:], 9) == []
    assert known.holders([], 9) == []
    known.removed(P1, CHAIN[2:10])
    assert known.depth(P1, CHAIN) == 2
    known.forget(P2)
    assert set(known.holders(CHAIN, 9)) == {P1, D1}
    known.check_integrity()


def test_bounded_the_worker_with_most_loses_its_oldest() -> None:
    known = PrefixMap(20)
    known.stored(P2, CHAIN[30:35])
    known.stored(P1, CHAIN[:25])
    assert len(known) <= 20
    assert known.depth(P2, CHAIN[30:35]) == 5
    assert known.depth(P1, CHAIN[24:]) == 1  # the newest is there, the oldest are not
    assert known.depth(P1, CHAIN) == 0
    known.check_integrity()
    off = PrefixMap(0)
    off.stored(P1, CHAIN)
    assert len(off) == 0


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([P1, P2, D1]),
            st.sampled_from(["stored", "removed", "forget"]),
            st.integers(0, 39),
            st.integers(0, 39),
        ),
        max_size=40,
    )
)
def test_any_order_of_changes_keeps_both_directions_equal(changes: list[tuple[object, str, int, int]]) -> None:
    known = PrefixMap(50)
    for worker, what, first, count in changes:
        if what == "forget":
            known.forget(worker)  # type: ignore[arg-type]
        else:
            getattr(known, what)(worker, CHAIN[first : first + count])
        known.check_integrity()


@pytest.mark.parametrize("near", range(9))
@pytest.mark.parametrize("depth", range(8))
def test_a_guess_changes_no_depth(near: int, depth: int) -> None:
    prefixes, hashes = PrefixMap(100), CHAIN[:7]
    prefixes.stored(P1, hashes[:depth])
    assert prefixes.depth(P1, hashes, near) == prefixes.depth(P1, hashes) == depth
