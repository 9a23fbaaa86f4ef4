"""Leases end exactly once, in any order."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from weir.errors import FailedPrecondition, ResourceExhausted
from weir.ids import RequestKey
from weir.transfer.lease import LeaseEnd, LeaseTable


def key(number: int, attempt: int = 1) -> RequestKey:
    return RequestKey(f"r-{number}", attempt)


def test_a_lease_grows_and_ends_once() -> None:
    table = LeaseTable()
    lease = table.open(key(1), "router-a", 100.0)
    assert table.extend(lease, [4, 5])
    assert table.extend(lease, [6])
    assert (table.open_count, table.blocks_held(), table.blocks_of(lease)) == (1, 3, (4, 5, 6))
    assert table.end(lease, LeaseEnd.READ_PROVEN) == [4, 5, 6]
    assert table.end(lease, LeaseEnd.CANCELLED) == []
    assert not table.extend(lease, [7])
    assert (table.open_count, table.blocks_held()) == (0, 0)
    assert table.was_ended(lease)
    assert table.end_reason(lease) is LeaseEnd.READ_PROVEN
    assert table.ended_total == {reason: int(reason is LeaseEnd.READ_PROVEN) for reason in LeaseEnd}


def test_unknown_leases_are_harmless() -> None:
    table = LeaseTable()
    assert table.end(1, LeaseEnd.READ_PROVEN) == []
    assert not table.was_ended(1)
    assert table.end_session("nobody") == []
    assert table.end_request(key(1)) == []
    with pytest.raises(AssertionError, match="never opened"):
        table.extend(1, [2])


def test_another_request_cannot_end_a_lease() -> None:
    table = LeaseTable()
    lease = table.open(key(1, 2), "s", 100.0, [3])
    assert table.end(lease, LeaseEnd.READ_PROVEN, key(1, 1)) == []
    assert table.end(lease, LeaseEnd.READ_PROVEN, key(2, 2)) == []
    assert table.end(lease, LeaseEnd.READ_PROVEN, key(1, 2)) == [3]


def test_a_session_takes_its_own_leases_only() -> None:
    table = LeaseTable()
    mine = [table.open(key(number), "a", 100.0, [number]) for number in (1, 2)]
    other = table.open(key(3), "b", 100.0, [3])
    assert table.end_session("a") == [(mine[0], [1]), (mine[1], [2])]
    assert table.end_session("a") == []
    assert table.is_open(other)


def test_a_cancel_takes_older_attempts_too() -> None:
    table = LeaseTable()
    leases = [table.open(key(1, attempt), "s", 100.0, [attempt]) for attempt in (1, 2, 3)]
    assert table.end_request(key(1, 2)) == [(leases[0], [1]), (leases[1], [2])]
    assert table.is_open(leases[2])


def test_one_open_lease_per_attempt() -> None:
    table = LeaseTable()
    first = table.open(key(1), "s", 100.0)
    with pytest.raises(FailedPrecondition, match=r"r-1\.1"):
        table.open(key(1), "s", 100.0)
    table.end(first, LeaseEnd.CANCELLED)
    assert table.open(key(1), "s", 100.0) == first + 1


def test_deadlines() -> None:
    table = LeaseTable()
    late = table.open(key(1), "s", 20.0, [1])
    soon = table.open(key(2), "s", 10.0, [2])
    assert table.next_deadline() == 10.0
    assert table.expire(10.0) == []
    assert table.expire(10.5) == [(soon, [2])]
    table.end(late, LeaseEnd.CANCELLED)
    assert table.expire(30.0) == []
    assert table.next_deadline() is None


def test_bounds() -> None:
    table = LeaseTable(max_leases=2, max_remembered=3)
    for number in range(5):
        table.end(table.open(key(number), "s", 10.0), LeaseEnd.DEADLINE)
    assert [table.end_reason(lease) is not None for lease in range(1, 6)] == [False, False, True, True, True]
    assert all(table.was_ended(lease) for lease in range(1, 6))
    table.open(key(1), "s", 10.0)
    table.open(key(2), "s", 10.0)
    with pytest.raises(ResourceExhausted, match="limit is 2"):
        table.open(key(3), "s", 10.0)


def test_the_deadline_heap_does_not_grow_with_ended_leases() -> None:
    table = LeaseTable()
    for number in range(10_000):
        table.end(table.open(key(number), "s", 1e9 + number), LeaseEnd.READ_PROVEN)
    assert len(table._deadlines) <= 65
    table.check_integrity()


class LeaseMachine(RuleBasedStateMachine):
    """Whatever ends a lease, and however often: its blocks come back once."""

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable(max_leases=8)
        self.now = 0.0
        self.next_block = 0
        self.open: dict[int, tuple[RequestKey, str, float, list[int]]] = {}
        self.given_back: set[int] = set()
        self.opened = 0

    def back(self, ended: list[tuple[int, list[int]]], expected: set[int]) -> None:
        assert {lease for lease, _ in ended} == expected
        for lease, blocks in ended:
            assert blocks == self.open.pop(lease)[3]
            assert not self.given_back & set(blocks)
            self.given_back.update(blocks)

    @rule(number=st.integers(0, 4), attempt=st.integers(1, 3), session=st.sampled_from("ab"), ttl=st.integers(0, 5))
    def begin(self, number: int, attempt: int, session: str, ttl: int) -> None:
        wanted = key(number, attempt)
        if len(self.open) >= 8:
            with pytest.raises(ResourceExhausted):
                self.table.open(wanted, session, self.now + ttl)
        elif any(lease[0] == wanted for lease in self.open.values()):
            with pytest.raises(FailedPrecondition):
                self.table.open(wanted, session, self.now + ttl)
        else:
            lease = self.table.open(wanted, session, self.now + ttl)
            assert lease not in self.open
            self.open[lease] = (wanted, session, self.now + ttl, [])
            self.opened += 1

    @rule(data=st.data(), count=st.integers(0, 3))
    def extend(self, data: st.DataObject, count: int) -> None:
        if not self.opened:
            return
        lease = data.draw(st.integers(1, self.opened))
        blocks = list(range(self.next_block, self.next_block + count))
        self.next_block += count
        assert self.table.extend(lease, blocks) == (lease in self.open)
        if lease in self.open:
            self.open[lease][3].extend(blocks)

    @rule(lease=st.integers(0, 30), reason=st.sampled_from(LeaseEnd))
    def end(self, lease: int, reason: LeaseEnd) -> None:
        known = lease in self.open
        blocks = self.table.end(lease, reason)
        if known:
            self.back([(lease, blocks)], {lease})
        else:
            assert blocks == []

    @rule(session=st.sampled_from("ab"))
    def lose_session(self, session: str) -> None:
        self.back(self.table.end_session(session), {one for one, it in self.open.items() if it[1] == session})

    @rule(number=st.integers(0, 4), attempt=st.integers(1, 3))
    def cancel(self, number: int, attempt: int) -> None:
        hit = {one for one, it in self.open.items() if it[0].request_id == f"r-{number}" and it[0].attempt <= attempt}
        self.back(self.table.end_request(key(number, attempt)), hit)

    @rule(seconds=st.integers(0, 4))
    def pass_time(self, seconds: int) -> None:
        self.now += seconds
        self.back(self.table.expire(self.now), {one for one, it in self.open.items() if it[2] < self.now})

    @rule(reason=st.sampled_from([LeaseEnd.SHUTDOWN, LeaseEnd.ROLE_CHANGE]))
    def end_everything(self, reason: LeaseEnd) -> None:
        self.back(self.table.end_everything(reason), set(self.open))

    @invariant()
    def books_agree(self) -> None:
        assert self.table.open_count == len(self.open)
        assert self.table.blocks_held() == sum(len(it[3]) for it in self.open.values())
        assert sum(self.table.ended_total.values()) == self.opened - len(self.open)
        for lease in range(1, self.opened + 1):
            assert self.table.was_ended(lease) == (lease not in self.open)
        self.table.check_integrity()


LeaseMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLeaseMachine = LeaseMachine.TestCase
