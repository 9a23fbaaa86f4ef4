"""The balance controller's advice: what counts, for how long, and what routers do for it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.unit.router.slo_fleet import Desk, key
from tests.unit.router.stage import D1, P1, Stage
from weir.balance.decision import Action, Decision
from weir.clock import ManualClock
from weir.errors import ResourceExhausted
from weir.lifecycle import Role
from weir.rpc.v1 import events_pb2
from weir.services.controller.telling import decision_event
from weir.services.router.advice import MAX_LASTS_S, MAX_OWED_TOKENS, Advice, Counsel
from weir.services.router.view import advice_of

LOCAL = Advice("c", 1, 1, 7, lasts_s=4.0, epochs=3, local_share=0.25)
PRESSURE = replace(LOCAL, local_share=0.0, admit_per_s=4.0)


def counsel(epochs: int = 3) -> Counsel:
    return Counsel(lambda: epochs)


def test_advice_counts_until_it_expires() -> None:
    one = counsel()
    one.take(LOCAL, 10.0)
    assert one.current(13.9) == LOCAL
    assert one.current(14.0) is None
    one.take(replace(LOCAL, sequence=2, lasts_s=1e9), 20.0)
    assert one.current(20.0 + MAX_LASTS_S - 0.1) is not None
    assert one.current(20.0 + MAX_LASTS_S) is None


def test_the_next_decision_ends_it_and_older_ones_are_nothing() -> None:
    one = counsel()
    one.take(replace(LOCAL, sequence=5), 10.0)
    one.take(replace(PRESSURE, sequence=4), 10.1)
    assert one.current(10.2) == replace(LOCAL, sequence=5)
    one.take(Advice("c", 1, 6, 8), 10.3)
    assert one.current(10.4) is None
    one.take(replace(LOCAL, sequence=1, incarnation=2), 10.5)
    one.take(replace(PRESSURE, sequence=9), 10.6)  # of the controller that was before
    assert one.current(10.7) == replace(LOCAL, sequence=1, incarnation=2)
    assert one.ignored == {"old": 2}


def test_a_dry_run_and_what_cannot_be_are_nothing() -> None:
    one = counsel()
    one.take(replace(LOCAL, dry_run=True), 10.0)
    assert one.current(10.0) is None
    wrong = (replace(LOCAL, local_share=1.5), replace(LOCAL, local_share=math.nan), replace(PRESSURE, admit_per_s=-1.0))
    for number, advice in enumerate(wrong):
        one.take(replace(advice, sequence=number + 2), 10.0)
        assert one.current(10.0) is None
    assert one.ignored == {"dry_run": 1}


def test_it_is_void_once_a_role_changes_or_a_worker_comes_or_goes() -> None:
    desk = Desk(prefills=1, decodes=2)
    found = desk.fleet.counsel
    found.take(LOCAL, 10.0)
    assert found.current(10.0) is not None
    desk.add("d1", Role.PREFILL, role_epoch=2)
    assert found.current(10.1) is None
    assert found.ignored == {"other_roles": 1}
    found.take(replace(LOCAL, sequence=2, epochs=4), 10.2)
    assert found.current(10.2) is not None
    desk.fleet.remove(key("d0"))
    assert found.current(10.3) is None


@pytest.mark.parametrize("share", [0.1, 0.25, 0.6])
def test_the_share_is_of_tokens(share: float) -> None:
    one = counsel()
    one.take(replace(LOCAL, local_share=share), 0.0)
    local = total = 0
    for number in range(400):
        tokens = 100 if number % 2 else 2_000
        due = one.local_due(1.0)
        one.placed(tokens, local=due, now_s=1.0)
        total, local = total + tokens, local + due * tokens
    assert local / total == pytest.approx(share, abs=0.01)


def test_what_nobody_had_the_slack_for_is_not_all_made_up_for() -> None:
    one = counsel()
    one.take(replace(LOCAL, lasts_s=100.0), 0.0)
    for _ in range(1_000):
        one.placed(1_000, local=False, now_s=1.0)
    due = 0
    while one.local_due(2.0):
        one.placed(1_000, local=True, now_s=2.0)
        due += 1
    assert due == math.ceil(MAX_OWED_TOKENS / 750)


def test_each_router_admits_its_part_and_says_when_to_come_again() -> None:
    one = counsel()
    assert one.wait_s(2, 0.0) == 0.0
    one.take(replace(PRESSURE, lasts_s=100.0), 0.0)
    assert [one.wait_s(2, 0.0) for _ in range(10)] == [0.0] * 10, "five seconds' worth at once, of 2 a second"
    waits = [one.wait_s(2, 0.0) for _ in range(3)]
    assert waits == pytest.approx([0.5, 1.0, 1.5]), "one after the other, as they could be admitted"
    admitted = sum(one.wait_s(2, 0.0 + tick / 100) == 0.0 for tick in range(1, 1_001))
    assert admitted == 20
    one.take(Advice("c", 1, 2, 8), 11.0)
    assert one.wait_s(2, 11.0) == 0.0


def test_a_decision_becomes_advice_by_the_deciders_clock() -> None:
    clock = ManualClock()
    decision = Decision(
        5, Action.BACK_PRESSURE, clock.monotonic_s(), "too much", expires_s=clock.monotonic_s() + 4.0, admit_per_s=2.5,
        epochs=9,
    )  # fmt: skip
    origin = events_pb2.EventOrigin(publisher_id="c", incarnation=3, sequence=8, unix_s=clock.unix_s())
    event = decision_event(decision, origin, clock, dry_run=False)
    advice = advice_of(events_pb2.DecisionEvent.FromString(event.SerializeToString()))
    assert advice.lasts_s == pytest.approx(4.0)
    assert replace(advice, lasts_s=4.0) == Advice("c", 3, 8, 5, 4.0, 9, 0.0, 2.5)
    flip = replace(decision, action=Action.FLIP, admit_per_s=0.0)
    assert advice_of(decision_event(flip, origin, clock, dry_run=False)).lasts_s == 0.0


# what the policy does


def advised(desk: Desk, share: float) -> None:
    desk.policy.counsel = desk.fleet.counsel
    epochs = desk.fleet.epochs()
    desk.fleet.counsel.take(replace(LOCAL, epochs=epochs, local_share=share, lasts_s=60.0), desk.now_s)
    desk.fleet.counsel.placed(4_000, local=False, now_s=desk.now_s)


def test_a_prompt_that_is_due_is_prefilled_on_a_decode_worker_with_slack() -> None:
    desk = Desk(prefills=1, decodes=2)
    desk.report("d0", running=1)
    advised(desk, 0.25)
    choice = desk.choose(desk.demand(400))
    assert choice is not None
    assert (choice.prefill, choice.reason) == (None, "advised")
    assert choice.decode is desk.view("d1")
    desk.fleet.counsel.placed(4_000, local=True, now_s=desk.now_s)
    choice = desk.choose(desk.demand(400))
    assert choice is not None
    assert choice.prefill is desk.view("p0"), "nothing is owed"


def test_advice_takes_no_slack_that_is_not_there() -> None:
    desk = Desk(prefills=1, decodes=1)
    desk.report("d0", running=2)
    desk.view("d0").bind("x", 50.0, 10)
    advised(desk, 0.25)
    choice = desk.choose(desk.demand(400))  # a pause of 205 ms
    assert choice is not None
    assert choice.prefill is desk.view("p0")
    choice = desk.choose(desk.demand(60))  # of 35 ms, beside a step of 10.6
    assert choice is not None
    assert choice.reason == "advised"


# what the door does


def test_back_pressure_refuses_before_any_work_and_says_when() -> None:
    stage = Stage(P1, D1)
    stage.fleet.counsel.take(replace(PRESSURE, epochs=2, admit_per_s=1.0, lasts_s=60.0), stage.now_s)
    for number in range(8):
        stage.admit(f"r{number}")
    with pytest.raises(ResourceExhausted) as caught:
        stage.admit("r8")
    assert caught.value.retry_after_s == pytest.approx(1.0)
    assert "the cluster carries 1 requests/s, more are asked (decision 7)" in str(caught.value)
    assert stage.book.refusals == {"back_pressure": 1}
    stage.now_s += 1.0
    stage.admit("r9")
    assert len(stage.book) == 9
