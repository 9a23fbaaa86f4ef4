"""Planning a read: runs, segments, what is lacking, and who the peers are."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.transfer.tickets import FINGERPRINT, NOW_UNIX_S, SOURCE, make_peer, make_ticket
from weir.errors import FingerprintMismatch, KvReadVoid, TransferUnavailable
from weir.ids import RequestKey, WorkerKey
from weir.transfer.plan import (
    Completion,
    PeerTable,
    Run,
    check_read,
    decode_completion,
    delta,
    encode_completion,
    merge_runs,
    segments,
)

PAIRS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=20, unique_by=lambda pair: pair[0])


def test_adjacent_blocks_merge_on_both_sides_only() -> None:
    pairs = [(7, 3), (5, 1), (6, 2), (8, 9), (20, 10)]
    assert merge_runs(pairs, block_bytes=1) == [Run(5, 1, 3), Run(8, 9, 1), Run(20, 10, 1)]
    assert merge_runs([], block_bytes=1) == []


def test_runs_are_split_at_the_largest_descriptor() -> None:
    pairs = [(block, block) for block in range(5)]
    assert merge_runs(pairs, block_bytes=10, max_descriptor_bytes=25) == [Run(0, 0, 2), Run(2, 2, 2), Run(4, 4, 1)]
    assert len(merge_runs(pairs, block_bytes=10, max_descriptor_bytes=5)) == 5


@given(PAIRS, st.integers(1, 6))
def test_runs_cover_exactly_the_pairs(pairs: list[tuple[int, int]], longest: int) -> None:
    runs = merge_runs(pairs, block_bytes=8, max_descriptor_bytes=8 * longest)
    covered = [(run.src + i, run.dst + i) for run in runs for i in range(run.count)]
    assert covered == sorted(pairs)
    assert all(1 <= run.count <= longest for run in runs)


@given(PAIRS, st.integers(1, 100))
def test_segments_keep_the_order_and_the_bound(pairs: list[tuple[int, int]], bound: int) -> None:
    runs = merge_runs(pairs, block_bytes=8)
    groups = segments(runs, block_bytes=8, max_segment_bytes=bound)
    assert [run for group in groups for run in group] == runs
    for group in groups:
        assert len(group) == 1 or sum(run.count * 8 for run in group) <= bound


def test_delta_is_what_the_reader_lacks() -> None:
    ticket = dataclasses.replace(make_ticket([(1, 0), (2, 0), (3, 0)]), first_block=4, num_tokens=28)
    assert [[ref.block for ref in delta(ticket, held)] for held in (0, 4, 5, 7, 9)] == [
        [1, 2, 3],
        [1, 2, 3],
        [2, 3],
        [],
        [],
    ]


@pytest.mark.parametrize(
    ("destinations", "fault"),
    [
        ([], "nothing to read"),
        ([(0, 3), (1, 3)], "destination is listed twice"),
        ([(0, 3), (0, 4)], "source is listed twice"),
        ([(0, 8)], "outside 8 blocks"),
        ([(0, -1)], "outside 8 blocks"),
    ],
)
def test_wrong_destinations_are_the_callers_fault(destinations: list[tuple[int, int]], fault: str) -> None:
    ticket = make_ticket([(1, 7), (2, 8)])
    pairs = [(ticket.blocks[index], own) for index, own in destinations]
    with pytest.raises(AssertionError, match=fault):
        check_read(ticket, pairs, make_peer(), FINGERPRINT, NOW_UNIX_S, 8)


def test_a_source_outside_the_ticket_is_the_callers_fault() -> None:
    stranger = make_ticket([(3, 1)]).blocks[0]
    with pytest.raises(AssertionError, match="not in the ticket"):
        check_read(make_ticket([(1, 7)]), [(stranger, 0)], make_peer(), FINGERPRINT, NOW_UNIX_S, 8)


@given(st.integers(1, 2**63), st.integers(1, 99), st.text("abcr- .0123456789é", min_size=1))
def test_completions_survive_the_wire(lease_id: int, attempt: int, request_id: str) -> None:
    done = Completion(lease_id, RequestKey(request_id, attempt))
    assert decode_completion(encode_completion(done)) == done


@given(st.binary(max_size=40))
def test_any_payload_is_a_completion_or_nothing(payload: bytes) -> None:
    assert decode_completion(payload) is None or payload.startswith(b"weir1 ")


def test_a_new_incarnation_replaces_the_old_for_good() -> None:
    peers = PeerTable(FINGERPRINT)
    old, new = make_peer(), make_peer(WorkerKey(SOURCE.worker_id, 99))
    assert peers.admit(old) is None
    assert peers.admit(old) is None
    assert peers.admit(new) is old
    assert (peers.knows(old.worker), peers.knows(new.worker)) == (False, True)
    with pytest.raises(TransferUnavailable, match="replaced"):
        peers.admit(old)
    assert peers.source_of(make_ticket([(1, 1)])) is new
    assert peers.drop(old.worker) is None
    assert peers.drop(new.worker) is new
    with pytest.raises(KvReadVoid, match="not connected"):
        peers.source_of(make_ticket([(1, 1)]))
    assert peers.admit(new) is None


def test_a_foreign_fingerprint_is_refused() -> None:
    peers = PeerTable(FINGERPRINT)
    foreign = dataclasses.replace(make_peer(), fingerprint=dataclasses.replace(FINGERPRINT, rope="other"))
    with pytest.raises(FingerprintMismatch, match="rope"):
        peers.admit(foreign)
    assert peers.all() == []
