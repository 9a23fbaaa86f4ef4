"""Workers of unequal size: a request goes only where it can be held, and is refused only when that is nowhere."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.router.slo_fleet import Desk
from tests.unit.router.stage import D1, D2, M1, M2, MODEL, P1, P2, Stage, info
from weir.errors import InvalidArgument, ResourceExhausted, Unavailable
from weir.lifecycle import FinishReason, RequestState, Role
from weir.services.router.commands import SendBeginDecode, SendBeginPrefill
from weir.services.router.facts import EndedNews
from weir.services.router.fleet import Fleet
from weir.services.router.policy import Demand

SMALL: dict[str, Any] = {"num_blocks": 10}
"""40 tokens; the others hold 400."""
PROMPT = tuple(range(30))


def ended(stage: Stage, worker: object, prefill: bool, code: str, message: str, attempt: int = 1) -> None:
    stage.book.attempt_ended(worker, prefill, "r", attempt, EndedNews(code, message), stage.now_s)  # type: ignore[arg-type]


def workers_of(stage: Stage) -> list[str]:
    return [name.split()[1] for name in stage.names() if name.startswith("Begin")]


@pytest.mark.parametrize(
    ("role", "prompt", "output", "fits"),
    [
        (Role.PREFILL, 40, 300, True),  # its output is made elsewhere
        (Role.PREFILL, 41, 1, False),
        (Role.PREFILL, 40, 361, False),  # beyond the context
        (Role.DECODE, 30, 11, True),  # the last token needs no KV
        (Role.DECODE, 30, 12, False),
        (Role.MIXED, 41, 1, False),
    ],
)
def test_what_a_worker_holds(role: Role, prompt: int, output: int, fits: bool) -> None:
    worker = info(D1, role, **SMALL)
    assert worker.holds(prompt, output) is fits
    unknown = info(D1, role, num_blocks=0, context_tokens=0)
    assert unknown.holds(prompt, output)


def test_rosters_are_the_same_object_for_what_is_alike() -> None:
    fleet = Fleet()
    for worker in (P1, D1, D2):
        fleet.put(info(worker, **(SMALL if worker == D1 else {}))).connected = True
    everyone = fleet.serving(MODEL)
    assert fleet.able(MODEL, Demand(5, 8)) is everyone
    large = fleet.able(MODEL, Demand(30, 20))
    assert [view.key for view in large] == [P1, D2]
    assert fleet.able(MODEL, Demand(35, 30)) is large
    assert [view.key for view in fleet.able(MODEL, Demand(30, 20, too_small=frozenset({D2})))] == [P1]
    fleet.put(info(D1, num_blocks=50))
    assert [view.key for view in fleet.able(MODEL, Demand(30, 20))] == [P1, D1, D2]


def test_the_limit_is_that_of_the_largest_that_decodes() -> None:
    fleet = Fleet()
    fleet.put(info(P1))
    assert fleet.token_limit(MODEL) == 0
    fleet.put(info(D1, **SMALL))
    assert fleet.token_limit(MODEL) == 40
    fleet.put(info(M1, num_blocks=20))
    assert fleet.token_limit(MODEL) == 80


def test_a_large_request_is_decoded_by_the_large_worker_only() -> None:
    stage = Stage(P1)
    stage.up(D1, **SMALL)
    stage.up(D2)
    for number in range(4):
        stage.admit(f"r{number}", prompt=PROMPT, max_tokens=50)
    begins = [command for command in stage.sent() if isinstance(command, SendBeginDecode)]
    assert {begin.worker for begin in begins} == {D2}
    assert len(begins) == 4


def test_a_large_prompt_is_prefilled_by_the_large_worker_only() -> None:
    stage = Stage(D1, P2)
    stage.up(P1, num_blocks=5)
    for number in range(4):
        stage.admit(f"r{number}", prompt=PROMPT)
    begins = [command for command in stage.sent() if isinstance(command, SendBeginPrefill)]
    assert {begin.worker for begin in begins} == {P2}
    assert len(begins) == 4


def test_a_prompt_too_large_for_every_prefill_worker_is_prefilled_where_it_is_decoded() -> None:
    stage = Stage(D1)
    stage.up(P1, num_blocks=5)
    stage.admit(prompt=PROMPT)
    assert stage.names() == ["BeginDecode decode-1 1"]


def test_a_large_request_goes_to_the_large_mixed_worker() -> None:
    stage = Stage(M2)
    stage.up(M1, **SMALL)
    for number in range(3):
        stage.admit(f"r{number}", prompt=PROMPT, max_tokens=50)
    assert workers_of(stage) == ["mixed-2"] * 3


def test_the_slo_policy_keeps_to_what_holds() -> None:
    desk = Desk(prefills=2, decodes=2)
    desk.add("d0", Role.DECODE, num_blocks=10)
    desk.add("p1", Role.PREFILL, num_blocks=10)
    demand = Demand(200, 100)
    able = desk.fleet.able(MODEL, demand)
    for _ in range(5):
        choice = desk.policy.choose(able, demand, desk.now_s)
        assert choice is not None
        assert choice.prefill is desk.view("p0")
        assert desk.policy.choose_decode(able, desk.view("p0"), demand, desk.now_s) is desk.view("d1")


def test_a_decode_worker_that_refuses_for_its_size_is_replaced_under_the_same_lease() -> None:
    """Its registry entry said that it fits: its own word counts, and it is not asked again."""
    stage = Stage(P1, D1, D2)
    stage.admit(max_tokens=50)
    assert workers_of(stage) == ["prefill-1", "decode-1"]
    stage.ticket(P1, "t", final=True)
    stage.first(P1, 10)
    stage.sent()
    ended(stage, D1, False, "OUT_OF_RANGE", "prompt + max_tokens = 54: the pool has 10")
    assert stage.names() == ["BeginDecode decode-2 1", "KvReady decode-2 t", "FirstToken decode-2 first 10"]
    (entry,) = stage.book.entries()
    assert (entry.attempt, entry.failures, entry.avoid, entry.too_small) == (1, 0, frozenset(), frozenset({D1}))
    assert stage.book.retries == {}
    view = stage.fleet.get(D1)
    assert view is not None
    assert view.breaker.opened == 0
    stage.lose(D2)
    assert stage.names() == []  # not the small one, though it is the only one left
    stage.up(D2)
    assert workers_of(stage) == ["decode-2"]


def test_a_prefill_worker_that_refuses_for_its_size_is_replaced() -> None:
    stage = Stage(P1, P2, D1)
    stage.admit()
    stage.sent()
    ended(stage, P1, True, "OUT_OF_RANGE", "too large")
    assert stage.names() == ["Cancel decode-1 1", "BeginPrefill prefill-2 2", "BeginDecode decode-1 2"]
    assert stage.book.entries()[0].failures == 0


def test_a_mixed_worker_that_refuses_for_its_size_is_replaced() -> None:
    stage = Stage(M1, M2)
    stage.admit()
    assert workers_of(stage) == ["mixed-1"]
    ended(stage, M1, False, "OUT_OF_RANGE", "too large")
    assert workers_of(stage) == ["mixed-2"]


def test_refused_for_its_size_by_the_last_one_it_ends_by_name() -> None:
    stage = Stage(M1, M2)
    stage.admit(max_tokens=50)
    for attempt, worker in enumerate((M1, M2), start=1):
        stage.sent()
        ended(stage, worker, False, "OUT_OF_RANGE", "the pool has 10", attempt)
    error = stage.end.error
    assert isinstance(error, InvalidArgument)
    assert str(error) == (
        "prompt + max_tokens = 55: at most 400 tokens, on the worker with most room (mixed-2: the pool has 10)"
    )


def test_what_no_known_worker_can_hold_is_refused_as_soon_as_that_is_known() -> None:
    stage = Stage(queue_timeout_s=60.0)
    stage.admit(prompt=PROMPT, max_tokens=50)
    stage.up(P1)
    stage.advance(1.0)
    assert len(stage.book) == 1  # who could decode it is not known
    stage.up(D1, **SMALL)
    stage.advance(0.1)
    assert isinstance(stage.end.error, InvalidArgument)
    assert str(stage.end.error) == "prompt + max_tokens = 80: at most 40 tokens, on the worker with most room"
    assert stage.end.state is RequestState.REJECTED
    assert stage.book.refusals == {"too_large": 1}


def test_one_too_large_for_those_that_are_up_lets_others_pass_and_waits_for_its_worker() -> None:
    stage = Stage(queue_timeout_s=5.0)
    stage.up(M1, **SMALL)
    stage.fleet.put(info(M2)).connected = False  # known, and about to be back
    stage.admit("large", prompt=PROMPT, max_tokens=50)
    stage.admit("small")
    assert workers_of(stage) == ["mixed-1"]
    assert stage.book.waiting == 1
    stage.up(M2)
    (begin,) = stage.sent()
    assert isinstance(begin, SendBeginDecode)
    assert (begin.worker, begin.admission.request_id) == (M2, "large")
    assert stage.book.waiting == 0


def test_one_whose_large_worker_never_comes_back_ends_as_unavailable() -> None:
    stage = Stage(queue_timeout_s=5.0)
    stage.up(M1, **SMALL)
    stage.fleet.put(info(M2)).connected = False
    stage.admit(prompt=PROMPT, max_tokens=50)
    stage.advance(5.1)
    assert isinstance(stage.end.error, Unavailable)
    assert str(stage.end.error) == "no worker that can hold it within 5.0 s"
    assert stage.book.waiting == 0


def test_a_parked_request_can_be_cancelled() -> None:
    stage = Stage()
    stage.up(M1, **SMALL)
    stage.fleet.put(info(M2)).connected = False
    stage.admit(prompt=PROMPT, max_tokens=50)
    assert stage.book.cancel("r", "gone", stage.now_s)
    stage.up(M2)
    assert stage.names() == []
    stage.book.check_integrity()


def test_small_ones_pass_a_large_one_that_waits_for_the_large_decode_worker() -> None:
    """They take what it cannot use, and keep out of what it waits for."""
    stage = Stage(P1, D2)
    stage.up(D1, **SMALL)
    stage.report(D2, running=3, free_blocks=5)
    stage.admit("large", prompt=PROMPT, max_tokens=50)
    assert workers_of(stage) == ["prefill-1"]
    stage.admit("small")
    assert workers_of(stage) == ["prefill-1", "decode-1"]
    stage.report(D2, running=3, free_blocks=8)
    assert workers_of(stage) == ["decode-2"]


def test_a_full_large_worker_is_no_room_and_not_too_large() -> None:
    stage = Stage(P1, D2, queue_timeout_s=2.0)
    stage.up(D1, **SMALL)
    stage.report(D2, running=3, free_blocks=0)
    stage.admit(prompt=PROMPT, max_tokens=50)
    stage.sent()
    stage.first(P1, 10)
    stage.advance(2.5)
    assert isinstance(stage.end.error, ResourceExhausted)


def test_a_resumed_request_keeps_to_what_holds_it() -> None:
    stage = Stage(M2)
    stage.up(M1, **SMALL)
    stage.admit(prompt=PROMPT, max_tokens=50)
    stage.tokens(M2, (10, 11), index=0)
    stage.sent()
    stage.lose(M2)
    stage.advance(1.0)
    assert workers_of(stage) == []
    stage.up(M2)
    assert workers_of(stage) == ["mixed-2"]
    stage.tokens(M2, (12,), attempt=2, index=2, finish=FinishReason.STOP)
    assert stage.emitted == [10, 11, 12]
