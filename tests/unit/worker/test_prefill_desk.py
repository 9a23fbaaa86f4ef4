"""The prefill desk, event by event: what it tells, what it orders, when a lease ends."""

import itertools

import pytest

from tests.unit.worker.kv_cases import NOW_UNIX_S, OURS, SOURCE, request
from weir.attempts.desk import AddRequest, AttemptOver, AttemptStarted, CancelRequest
from weir.engine.output import Event, Finished, Preempted, Prefilled, Progress, SealedBlock, Started, TokensOut, Usage
from weir.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted
from weir.ids import RequestKey
from weir.lifecycle import FinishReason
from weir.services.prefill.desk import FirstTokenMade, News, PrefillDesk, ReleaseKv, TicketIssued
from weir.transfer.lease import LeaseEnd, LeaseTable

KEY = RequestKey("r-1", 1)
USAGE = Usage(10, 1, 10, 0, 0, 0, 0)


def make() -> PrefillDesk:
    desk = PrefillDesk(SOURCE, OURS.digest(), LeaseTable(), block_size=4, max_lease_s=30.0, max_news=100)
    desk.open_session("s")
    return desk


def tell(desk: PrefillDesk, *events: Event) -> list[News]:
    desk.on_events(events, NOW_UNIX_S)
    return desk.take_news("s")


def sealed(*indices: int) -> tuple[SealedBlock, ...]:
    return tuple(SealedBlock(index, 20 + index, 7) for index in indices)


def begun(context: int = 10) -> PrefillDesk:
    desk = make()
    desk.begin("s", request(KEY, context=context), 10.0, None)
    assert desk.take_orders() == [AddRequest(request(KEY, context=context))]
    return desk


def holding() -> PrefillDesk:
    desk = begun()
    tell(desk, Started(KEY, 0, (20, 21, 22), 0.5), Progress(KEY, 10, sealed(0, 1, 2)))
    tell(desk, TokensOut(KEY, 0, (5,), None, 0.25), Prefilled(KEY, USAGE))
    return desk


def test_a_prefill_in_two_chunks() -> None:
    desk = begun()
    assert tell(desk, Started(KEY, 0, (20, 21, 22), 0.5)) == [AttemptStarted(KEY, 0, 0.5)]
    (first,) = tell(desk, Progress(KEY, 6, sealed(0)))
    assert isinstance(first, TicketIssued)
    ticket = first.ticket
    assert (ticket.first_block, ticket.num_tokens, ticket.final, ticket.lease_id) == (0, 4, False, 1)
    assert ticket.deadline_unix_s == NOW_UNIX_S + 10.0
    last, made = tell(desk, Progress(KEY, 10, sealed(1, 2)), TokensOut(KEY, 0, (5,), None, 0.25), Prefilled(KEY, USAGE))
    assert isinstance(last, TicketIssued)
    assert (last.ticket.first_block, last.ticket.num_tokens, last.ticket.final) == (1, 10, True)
    assert made == FirstTokenMade(KEY, 0, 5, None, None, 0.25, USAGE)
    assert desk.leases.blocks_of(1) == (20, 21, 22)
    desk.lease_read(1)
    assert desk.take_news("s") == [AttemptOver(KEY, "OK")]
    assert desk.take_orders() == [ReleaseKv(KEY)]
    assert len(desk) == 0


def test_a_chunk_that_completes_no_block_announces_nothing() -> None:
    desk = begun()
    assert tell(desk, Started(KEY, 0, (20, 21, 22), 0.0), Progress(KEY, 3, ()))[1:] == []
    assert desk.leases.open_count == 0


def test_the_first_token_ends_the_request() -> None:
    desk = begun()
    news = tell(
        desk,
        Started(KEY, 0, (20, 21, 22), 0.0),
        Progress(KEY, 10, sealed(0, 1, 2)),
        TokensOut(KEY, 0, (2,), None, 0.25),
        Finished(KEY, FinishReason.STOP, 2, USAGE),
    )
    assert news[1:] == [
        FirstTokenMade(KEY, 0, 2, None, FinishReason.STOP, 0.25, USAGE),
        AttemptOver(KEY, "OK"),
    ]
    assert desk.leases.ended_total[LeaseEnd.CANCELLED] == 0
    assert desk.take_orders() == []


ENDINGS = ["proven", "release", "cancel", "session", "deadline", "drain"]


def end(desk: PrefillDesk, how: str) -> None:
    if how == "proven":
        desk.lease_read(1)
    elif how == "release":
        desk.release(KEY, 1)
    elif how == "cancel":
        desk.cancel("r-1", 1)
    elif how == "session":
        desk.end_session("s")
    elif how == "deadline":
        desk.expire(NOW_UNIX_S + 100.0)
    else:
        desk.end_everything("drain", LeaseEnd.ROLE_CHANGE)


@pytest.mark.parametrize("order", list(itertools.permutations(ENDINGS, 3)))
def test_a_held_lease_ends_once_whatever_the_order(order: tuple[str, ...]) -> None:
    desk = holding()
    for how in order:
        end(desk, how)
        end(desk, how)
    assert desk.take_orders() == [ReleaseKv(KEY)]
    assert desk.leases.open_count == len(desk) == 0
    assert sum(desk.leases.ended_total.values()) == 1
    if "session" not in order:
        assert len(desk.take_news("s")) == 1
    desk.leases.check_integrity()


@pytest.mark.parametrize("how", ["cancel", "session", "deadline", "drain"])
def test_running_work_is_cancelled_and_awaited(how: str) -> None:
    desk = begun()
    tell(desk, Started(KEY, 0, (20, 21, 22), 0.0), Progress(KEY, 6, sealed(0)))
    end(desk, how)
    assert desk.take_orders() == [CancelRequest(KEY)]
    assert desk.take_news("s") == []
    # The step that was under way ended the prefill; the cancel came after it.
    assert tell(desk, TokensOut(KEY, 0, (5,)), Prefilled(KEY, USAGE)) == []
    news = tell(desk, Finished(KEY, FinishReason.CANCELLED, None, USAGE))
    code = {"cancel": "CANCELLED", "session": None, "deadline": "DEADLINE_EXCEEDED", "drain": "UNAVAILABLE"}[how]
    assert [over.code for over in news if isinstance(over, AttemptOver)] == ([] if code is None else [code])
    assert len(desk) == desk.leases.open_count == 0


def test_preemption_voids_the_lease_and_another_one_begins() -> None:
    desk = begun()
    tell(desk, Started(KEY, 0, (20, 21, 22), 0.0), Progress(KEY, 6, sealed(0)))
    assert tell(desk, Preempted(KEY)) == []
    assert desk.leases.open_count == 0
    news = tell(desk, Started(KEY, 0, (30, 31, 32), 0.0), Progress(KEY, 10, sealed(0, 1, 2)))
    assert isinstance(news[-1], TicketIssued)
    assert (news[-1].ticket.lease_id, news[-1].ticket.first_block) == (2, 0)


def test_each_chunk_renews_the_lease() -> None:
    desk = begun(context=12)
    tell(desk, Started(KEY, 0, (20, 21, 22), 0.0), Progress(KEY, 4, sealed(0)))
    desk.on_events([Progress(KEY, 8, sealed(1))], NOW_UNIX_S + 8.0)
    desk.expire(NOW_UNIX_S + 11.0)
    assert desk.leases.is_open(1)
    desk.expire(NOW_UNIX_S + 18.5)
    assert not desk.leases.is_open(1)


def test_refusals() -> None:
    desk = begun()
    desk.refused(KEY, InvalidArgument("prompt", [], "must hold at least 1 token"))
    (over,) = desk.take_news("s")
    assert isinstance(over, AttemptOver)
    assert over.code == "INVALID_ARGUMENT"
    desk.begin("s", request(KEY), 10.0, None)
    desk.refused(KEY, ResourceExhausted("full", 1.5))
    (over,) = desk.take_news("s")
    assert isinstance(over, AttemptOver)
    assert (over.code, over.retry_after_s) == ("RESOURCE_EXHAUSTED", 1.5)
    assert len(desk) == 0


def test_a_deadline_of_the_engine() -> None:
    desk = holding()
    news = tell(desk, Finished(KEY, FinishReason.ERROR, None, USAGE, DeadlineExceeded("late")))
    assert [type(item) for item in news] == [AttemptOver]
    assert desk.leases.ended_total[LeaseEnd.DEADLINE] == 1
    assert desk.take_orders() == []


def test_another_requests_lease_is_left_alone() -> None:
    desk = holding()
    desk.release(RequestKey("r-2", 1), 1)
    desk.release(RequestKey("r-1", 2), 1)
    desk.lease_read(99)
    assert desk.leases.is_open(1)


def test_a_router_that_does_not_read_is_cut_off() -> None:
    desk = make()
    for number in range(101):
        desk.refuse("s", RequestKey(f"r-{number}", 1), InvalidArgument("x", 1, "y"))
    with pytest.raises(ResourceExhausted, match="more than 100 messages"):
        desk.take_news("s")
