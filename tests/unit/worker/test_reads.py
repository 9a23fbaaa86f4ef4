"""The reads of one sequence: what is read, when it is complete, and that nothing void ever counts."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.worker.kv_cases import BLOCK, KEY, NOW_UNIX_S, OURS, peer, source_block, ticket
from weir.errors import KvReadVoid
from weir.ids import RequestKey, WorkerKey
from weir.services.decode.reads import (
    Action,
    KvComplete,
    KvProven,
    LeaseUnneeded,
    ReadResult,
    ReadsDone,
    Refused,
    SequenceReads,
    StartRead,
    Void,
)

RESULT = ReadResult(bytes=64, descriptors=1, transport="test", guard_s=0.001, checksum_s=0.002)
GENERATION = KvReadVoid("generation", "planted")


def make(context: int, max_reads: int = 2) -> SequenceReads:
    return SequenceReads(KEY, peer(), OURS, range(context), max_reads)


def started(context: int, cached: int = 0, max_reads: int = 2) -> SequenceReads:
    reads = make(context, max_reads)
    assert reads.blocks_known(cached, range(50, 50 + -(-context // BLOCK)), 0.0) == []
    return reads


def only(actions: list[Action], kind: type) -> list[Action]:
    return [action for action in actions if isinstance(action, kind)]


def read_of(actions: list[Action]) -> StartRead:
    found = only(actions, StartRead)
    assert len(found) == 1, actions
    assert isinstance(found[0], StartRead)
    return found[0]


def test_one_ticket_one_read() -> None:
    reads = started(10)
    read = read_of(reads.offer(ticket(0, 3, 10), NOW_UNIX_S, 1.0))
    assert read.destinations == ((source_block(0), 50), (source_block(1), 51), (source_block(2), 52))
    assert read.notify is True
    assert read.ticket == ticket(0, 3, 10)
    done = reads.read_proven(read.read_id, RESULT, 1.5)
    assert [type(action) for action in done] == [KvProven, KvComplete, ReadsDone]
    assert done[0] == KvProven(10)
    complete = done[1]
    assert isinstance(complete, KvComplete)
    assert (complete.lease_id, complete.notified) == (1, True)
    assert complete.timings.busy_s == 0.5
    assert complete.timings.exposed_s == 0.5
    assert complete.timings.reads == 1
    assert complete.timings.bytes == 64


def test_tickets_before_the_blocks_are_known() -> None:
    reads = make(10)
    assert reads.offer(ticket(0, 2, 10), NOW_UNIX_S, 0.0) == []
    assert reads.offer(ticket(2, 3, 10), NOW_UNIX_S, 0.0) == []
    read = read_of(reads.blocks_known(0, (5, 6, 7), 1.0))
    assert [block for _, block in read.destinations] == [5, 6, 7]
    assert read.ticket.first_block == 0
    assert read.ticket.num_tokens == 10
    assert read.ticket.final is True


def test_chunks_overlap_and_waiting_tickets_are_merged() -> None:
    reads = started(40, max_reads=1)
    first = read_of(reads.offer(ticket(0, 3, 40), NOW_UNIX_S, 0.0))
    assert first.notify is False
    assert reads.offer(ticket(3, 5, 40), NOW_UNIX_S, 0.1) == []
    assert reads.offer(ticket(5, 8, 40), NOW_UNIX_S, 0.2) == []
    then = reads.read_proven(first.read_id, RESULT, 0.3)
    assert then[0] == KvProven(12)
    second = read_of(then)
    assert [ref for ref, _ in second.destinations] == [source_block(i) for i in range(3, 8)]
    assert second.notify is False
    end = reads.offer(ticket(8, 10, 40), NOW_UNIX_S, 0.4)
    assert end == []
    third = read_of(reads.read_proven(second.read_id, RESULT, 0.5))
    assert third.notify is True
    done = reads.read_proven(third.read_id, RESULT, 0.75)
    assert isinstance(done[1], KvComplete)
    assert done[1].timings.exposed_s == pytest.approx(0.35)
    assert done[1].timings.reads == 3


def test_only_what_is_lacking_is_read() -> None:
    reads = started(14, cached=8)
    read = read_of(reads.offer(ticket(0, 4, 14), NOW_UNIX_S, 0.0))
    assert read.destinations == ((source_block(2), 52), (source_block(3), 53))
    assert read.ticket.first_block == 2
    assert read.ticket.blocks == (source_block(2), source_block(3))


def test_everything_was_cached() -> None:
    reads = make(8)
    actions = reads.blocks_known(8, (1, 2), 0.0)
    assert [type(action) for action in actions] == [KvComplete, ReadsDone]
    assert reads.offer(ticket(0, 1, 8), NOW_UNIX_S, 0.1) == []
    assert reads.offer(ticket(1, 2, 8), NOW_UNIX_S, 0.1) == [LeaseUnneeded(1)]
    assert only(reads.offer(ticket(1, 2, 8), NOW_UNIX_S, 0.2), Refused) != []


def test_a_used_ticket_is_refused() -> None:
    reads = started(4)
    read = read_of(reads.offer(ticket(0, 1, 4), NOW_UNIX_S, 0.0))
    reads.read_proven(read.read_id, RESULT, 0.0)
    refused = reads.offer(ticket(0, 1, 4), NOW_UNIX_S, 0.0)
    assert [type(action) for action in refused] == [Refused]
    assert isinstance(refused[0], Refused)
    assert refused[0].reason == "already_used"


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (ticket(0, 3, 10, source=WorkerKey("other", 7)), "wrong_worker"),
        (ticket(0, 3, 10, source=WorkerKey("prefill-a", 8)), "wrong_incarnation"),
        (ticket(0, 3, 10, deadline_unix_s=NOW_UNIX_S - 1), "lease_expired"),
        (ticket(0, 3, 10, key=RequestKey("r-2", 1)), "malformed"),
        (ticket(0, 2, 10, final=True), "malformed"),
        (ticket(0, 4, 14), "malformed"),
        (ticket(0, 2, 6), "malformed"),
        (ticket(1, 3, 10), "malformed"),
        (ticket(0, 3, 10, lease_id=999), "out_of_range"),
    ],
)
def test_a_bad_ticket_voids_and_reads_nothing(bad: object, reason: str) -> None:
    reads = started(10)
    actions = reads.offer(bad, NOW_UNIX_S, 0.0)  # type: ignore[arg-type]
    assert only(actions, StartRead) == []
    voids = only(actions, Void)
    assert len(voids) == 1
    assert isinstance(voids[0], Void)
    assert voids[0].reason == reason


def test_void_then_sent_again() -> None:
    reads = started(10)
    first = read_of(reads.offer(ticket(0, 1, 10), NOW_UNIX_S, 0.0))
    second = read_of(reads.offer(ticket(1, 2, 10), NOW_UNIX_S, 0.0))
    assert isinstance(reads.read_void(first.read_id, GENERATION, 0.0)[0], Void)
    # A late ticket of before, and the other read: neither restarts it.
    assert reads.offer(ticket(2, 3, 10), NOW_UNIX_S, 0.0) == []
    assert reads.read_proven(second.read_id, RESULT, 0.0) == []
    again = read_of(reads.offer(ticket(0, 1, 10), NOW_UNIX_S, 0.0))
    assert [block for _, block in again.destinations] == [50]
    rest = reads.offer(ticket(2, 3, 10), NOW_UNIX_S, 0.0)
    last = read_of(rest)
    assert [block for _, block in last.destinations] == [52]
    assert reads.read_proven(again.read_id, RESULT, 0.0) == [KvProven(8)]
    done = reads.read_proven(last.read_id, RESULT, 0.0)
    assert [type(action) for action in done] == [KvProven, KvComplete, ReadsDone]
    assert isinstance(done[1], KvComplete)
    assert done[1].timings.void_reads == 1
    assert done[1].notified is False


def test_a_newer_lease_replaces_and_the_old_ones_void_is_harmless() -> None:
    reads = started(12)
    old = read_of(reads.offer(ticket(0, 2, 12), NOW_UNIX_S, 0.0))
    # The source was preempted: everything is announced again under another lease.
    assert reads.offer(ticket(0, 1, 12, lease_id=2), NOW_UNIX_S, 0.0) == []
    assert [type(a) for a in reads.offer(ticket(2, 3, 12), NOW_UNIX_S, 0.0)] == [Refused]
    actions = reads.read_void(old.read_id, GENERATION, 0.0)
    assert [type(action) for action in actions] == [Refused, StartRead]
    one = read_of(actions)
    assert one.destinations == ((source_block(0, 2), 50),)
    two = read_of(reads.offer(ticket(1, 3, 12, lease_id=2), NOW_UNIX_S, 0.0))
    assert one.ticket.lease_id == two.ticket.lease_id == 2
    reads.read_proven(one.read_id, RESULT, 0.0)
    assert isinstance(reads.read_proven(two.read_id, RESULT, 0.0)[1], KvComplete)


def test_close_waits_for_the_reads_under_way() -> None:
    reads = started(12)
    one = read_of(reads.offer(ticket(0, 1, 12), NOW_UNIX_S, 0.0))
    two = read_of(reads.offer(ticket(1, 2, 12), NOW_UNIX_S, 0.0))
    assert reads.close() == []
    assert reads.offer(ticket(2, 3, 12), NOW_UNIX_S, 0.0) == []
    assert reads.read_void(two.read_id, GENERATION, 0.0) == []
    assert reads.read_proven(one.read_id, RESULT, 0.0) == [ReadsDone()]
    assert reads.close() == []


def test_close_before_the_blocks_are_known() -> None:
    reads = make(12)
    reads.offer(ticket(0, 3, 12), NOW_UNIX_S, 0.0)
    assert reads.close() == []
    assert reads.blocks_known(0, (1, 2, 3), 0.0) == [ReadsDone()]


class World:
    """A source that announces chunks, a router that re-sends after a void, and reads that end in any order."""

    def __init__(self, seed: int, context: int) -> None:
        self.random = random.Random(seed)
        self.context = context
        self.blocks = -(-context // BLOCK)
        self.cached = self.random.randint(0, context // BLOCK) * BLOCK
        self.table = self.random.sample(range(1000), self.blocks)
        self.reads = make(context, self.random.choice([1, 2, 3]))
        self.lease_id = 1
        self.announced = 0
        self.wire: list[tuple[int, int, int]] = []
        self.running: dict[int, StartRead] = {}
        self.proven: set[int] = set(range(self.cached // BLOCK))
        self.told = 0
        self.completes = 0
        self.done = 0
        self.closed = False

    def steps(self) -> list[str]:
        possible = []
        if not self.reads.started:
            possible.append("start")
        if self.announced < self.blocks:
            possible.append("announce")
            if self.announced and self.random.random() < 0.1:
                possible.append("preempt")
        if self.wire:
            possible.append("deliver")
        if self.running:
            possible += ["end_well", "end_well", "end_void"] if self.random.random() < 0.3 else ["end_well"]
        return possible

    def run(self, close_at: int | None) -> None:
        count = 0
        while steps := self.steps():
            count += 1
            assert count < 3_000, "no end"
            if close_at == count:
                self.closed = True
                self.take(self.reads.close())
            getattr(self, self.random.choice(steps))()

    def start(self) -> None:
        self.take(self.reads.blocks_known(self.cached, self.table, 0.0))

    def announce(self) -> None:
        end = self.random.randint(self.announced + 1, self.blocks)
        self.wire.append((self.lease_id, self.announced, end))
        self.announced = end

    def preempt(self) -> None:
        self.lease_id += 1
        self.announced = 0

    def deliver(self) -> None:
        lease_id, first, end = self.wire.pop(0)
        self.take(self.reads.offer(ticket(first, end, self.context, lease_id=lease_id), NOW_UNIX_S, 0.0))

    def end_well(self) -> None:
        read = self.running.pop(self.random.choice(sorted(self.running)))
        for _, block in read.destinations:
            index = self.table.index(block)
            assert index not in self.proven, "read twice"
            self.proven.add(index)
        self.take(self.reads.read_proven(read.read_id, RESULT, 0.0))

    def end_void(self) -> None:
        read = self.running.pop(self.random.choice(sorted(self.running)))
        self.take(self.reads.read_void(read.read_id, GENERATION, 0.0))

    def take(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, StartRead):
                self.check_read(action)
            elif isinstance(action, KvProven):
                assert set(range(-(-action.num_tokens // BLOCK))) <= self.proven
                assert action.num_tokens > self.told
                self.told = action.num_tokens
            elif isinstance(action, KvComplete):
                assert self.proven == set(range(self.blocks))
                self.completes += 1
            elif isinstance(action, ReadsDone):
                assert not self.running
                self.done += 1
            elif isinstance(action, Void) and self.announced:
                # The router sends everything that was announced under the lease again.
                self.wire.append((self.lease_id, 0, self.announced))

    def check_read(self, read: StartRead) -> None:
        assert not self.closed
        refs = set(read.ticket.blocks)
        busy = {block for other in self.running.values() for _, block in other.destinations}
        for ref, block in read.destinations:
            index = self.table.index(block)
            assert ref in refs
            assert ref == source_block(index, read.ticket.lease_id)
            assert index >= self.cached // BLOCK
            assert block not in busy, "two reads into one block"
        self.running[read.read_id] = read


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 60))
def test_any_order_ends_complete(seed: int, context: int) -> None:
    world = World(seed, context)
    world.run(close_at=None)
    assert world.completes == 1
    assert world.done >= 1
    assert world.reads.outstanding == 0
    assert world.proven == set(range(world.blocks))


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 60), st.integers(1, 30))
def test_any_order_closed_anywhere_ends_with_no_read(seed: int, context: int, close_at: int) -> None:
    world = World(seed, context)
    world.run(close_at=close_at)
    assert world.completes <= 1
    assert world.reads.outstanding == 0
    assert world.done >= 1
