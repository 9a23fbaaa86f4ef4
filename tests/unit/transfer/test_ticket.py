"""Tickets fail closed, with the reason."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.transfer.tickets import FINGERPRINT, NOW_UNIX_S, make_peer, make_ticket
from weir.errors import FingerprintMismatch, KvReadVoid
from weir.ids import WorkerKey
from weir.transfer.fingerprint import Fingerprint, check_compatible
from weir.transfer.ticket import BlockRef, GuardEntry, VoidReason, check_ticket, prove

GOOD = make_ticket([(1, 7), (2, 8), (5, 1)])
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("wrong_worker", {"source": WorkerKey("prefill-2", 11)}),
    ("wrong_incarnation", {"source": WorkerKey("prefill-1", 10)}),
    ("fingerprint", {"fingerprint_digest": b"x" * 16}),
    ("lease_expired", {"deadline_unix_s": NOW_UNIX_S - 0.001}),
    ("malformed", {"blocks": ()}),
    ("malformed", {"num_tokens": 0}),
    ("malformed", {"num_tokens": -3}),
    ("malformed", {"num_tokens": 13}),
    ("malformed", {"num_tokens": 8}),
    ("malformed", {"first_block": -1}),
    ("malformed", {"first_block": 1}),
    ("malformed", {"blocks": (BlockRef(1, 7), BlockRef(1, 7), BlockRef(5, 1))}),
    ("out_of_range", {"blocks": (BlockRef(1, 7), BlockRef(8, 7), BlockRef(5, 1))}),
    ("out_of_range", {"blocks": (BlockRef(1, 7), BlockRef(-1, 7), BlockRef(5, 1))}),
]


def test_a_good_ticket_passes() -> None:
    check_ticket(GOOD, make_peer(), ours=FINGERPRINT, now_unix_s=NOW_UNIX_S)
    partly_filled = dataclasses.replace(GOOD, num_tokens=9)
    check_ticket(partly_filled, make_peer(), ours=FINGERPRINT, now_unix_s=NOW_UNIX_S)


@pytest.mark.parametrize(("reason", "change"), REFUSED)
def test_what_is_refused_before_a_byte_is_read(reason: str, change: dict[str, Any]) -> None:
    with pytest.raises(KvReadVoid) as void:
        check_ticket(dataclasses.replace(GOOD, **change), make_peer(), ours=FINGERPRINT, now_unix_s=NOW_UNIX_S)
    assert void.value.reason == reason
    assert VoidReason(reason)


U64 = st.integers(0, 2**64 - 1)


@given(st.lists(st.tuples(U64, U64, U64, U64, U64), min_size=1, max_size=5))
def test_a_proof_passes_only_if_all_is_equal(rows: list[tuple[int, int, int, int, int]]) -> None:
    refs = [BlockRef(block, promised) for block, promised, *_ in rows]
    guards = [GuardEntry(generation, checksum) for _, _, generation, checksum, _ in rows]
    found = [arrived for *_, arrived in rows]
    if any(ref.generation != guard.generation for ref, guard in zip(refs, guards, strict=True)):
        expected = "generation"
    elif any(guard.checksum != arrived for guard, arrived in zip(guards, found, strict=True)):
        expected = "checksum"
    else:
        prove(refs, guards, found)
        return
    with pytest.raises(KvReadVoid) as void:
        prove(refs, guards, found)
    assert void.value.reason == expected


def test_a_proof_of_equal_rows() -> None:
    refs = [BlockRef(3, 9), BlockRef(4, 2**64 - 1)]
    guards = [GuardEntry(9, 5), GuardEntry(2**64 - 1, 6)]
    prove(refs, guards, [5, 6])
    prove(refs, guards, None)


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Fingerprint)])
def test_every_field_but_the_tp_degree_must_match(field: str) -> None:
    value = getattr(FINGERPRINT, field)
    change: dict[str, Any] = {field: value + 1 if isinstance(value, int) else value + "x"}
    other = dataclasses.replace(FINGERPRINT, **change)
    if field == "tp_degree":
        check_compatible(FINGERPRINT, other)
        assert other.digest() == FINGERPRINT.digest()
        return
    with pytest.raises(FingerprintMismatch) as mismatch:
        check_compatible(FINGERPRINT, other)
    assert (mismatch.value.field, mismatch.value.ours) == (field, value)
    assert other.digest() != FINGERPRINT.digest()
