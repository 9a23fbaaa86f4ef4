"""Who is chosen, and what counts as load."""

from __future__ import annotations

from typing import Any

from tests.unit.router.stage import D1, D2, M1, MODEL, P1, P2, info
from weir.ids import WorkerKey
from weir.lifecycle import Role
from weir.services.router.fleet import Fleet, Load, WorkerView
from weir.services.router.policy import Choice, Demand, LeastLoaded
from weir.services.router.retry import RetryBudget, backoff_s


def fleet_of(*workers: WorkerKey, **changes: Any) -> Fleet:
    fleet = Fleet()
    for worker in workers:
        fleet.put(info(worker, **changes)).connected = True
    return fleet


def view_of(fleet: Fleet, worker: WorkerKey) -> WorkerView:
    view = fleet.get(worker)
    assert view is not None
    return view


def choose(fleet: Fleet, tokens: int = 8, avoid: frozenset[WorkerKey] = frozenset()) -> Choice | None:
    return LeastLoaded().choose(fleet.serving(MODEL), Demand(tokens, 8, avoid), 10.0)


def pair(fleet: Fleet, tokens: int = 8, avoid: frozenset[WorkerKey] = frozenset()) -> tuple[object, object]:
    choice = choose(fleet, tokens, avoid)
    assert choice is not None
    return (
        choice.prefill.key if choice.prefill else None,
        choice.decode.key if choice.decode else None,
    )


def report(view: WorkerView, sequence: int, **load: int) -> None:
    values = {"running": 0, "waiting": 0, "pending_prefill_tokens": 0, "free_blocks": 100, "total_blocks": 100}
    view.take_report(Load(sequence, **{**values, **load}), 10.0)


def test_prefill_by_pending_tokens_reported_and_sent() -> None:
    fleet = fleet_of(P1, P2, D1)
    report(view_of(fleet, P1), 1, pending_prefill_tokens=50)
    assert pair(fleet) == (P2, D1)
    view_of(fleet, P2).note("r", 10.0, 60, 0, 0)
    assert pair(fleet) == (P1, D1)
    view_of(fleet, P2).settle("r")
    assert pair(fleet) == (P2, D1)


def test_equal_workers_are_taken_in_turn() -> None:
    fleet = fleet_of(P1, P2, D1)
    first = pair(fleet)[0]
    assert isinstance(first, WorkerKey)
    fleet.used(view_of(fleet, first))
    assert pair(fleet)[0] == (P2 if first == P1 else P1)


def test_decode_by_sequences_then_by_pressure() -> None:
    fleet = fleet_of(P1, D1, D2)
    report(view_of(fleet, D1), 1, running=3)
    report(view_of(fleet, D2), 1, running=2)
    assert pair(fleet) == (P1, D2)
    report(view_of(fleet, D2), 2, running=2, free_blocks=10)
    assert pair(fleet) == (P1, D1)  # k/(1-k) of D2 is about 12


def test_a_decode_worker_needs_room_for_the_prompt() -> None:
    fleet = fleet_of(P1, D1)
    report(view_of(fleet, D1), 1, running=1, free_blocks=2)
    assert pair(fleet, tokens=7) == (P1, D1)
    assert pair(fleet, tokens=8) == (P1, None)
    report(view_of(fleet, D1), 2, free_blocks=2)  # idle: the worker itself decides
    assert pair(fleet, tokens=8) == (P1, D1)


def test_incompatible_draining_unlisted_and_unconnected_workers_are_not_chosen() -> None:
    fleet = fleet_of(P1)
    fleet.put(info(D1, fingerprint=b"other")).connected = True
    assert pair(fleet) == (None, D1)  # nobody reads what P1 would prefill: D1 does it all
    view_of(fleet, D1).connected = False
    assert choose(fleet) is None
    fleet.put(info(D2, draining=True)).connected = True
    assert choose(fleet) is None
    fleet.put(info(D2))
    view = view_of(fleet, D2)
    assert pair(fleet) == (P1, D2)
    view.listed = False
    assert choose(fleet) is None
    view.listed, view.connected = True, False
    assert choose(fleet) is None


def test_another_model_is_another_world() -> None:
    fleet = fleet_of(P1, D1, model="other")
    assert choose(fleet) is None


def test_mixed_workers_help_when_they_are_less_busy() -> None:
    fleet = fleet_of(P1, D1, M1)
    assert pair(fleet) == (P1, D1)
    report(view_of(fleet, P1), 1, pending_prefill_tokens=100)
    assert pair(fleet) == (None, M1)
    view_of(fleet, P1).refuses_prefill_until_s = 11.0
    report(view_of(fleet, M1), 1, pending_prefill_tokens=500)
    assert pair(fleet) == (None, M1)


def test_workers_that_failed_a_request_are_avoided_unless_they_are_the_last_of_their_role() -> None:
    fleet = fleet_of(P1, P2, D1)
    assert pair(fleet, avoid=frozenset({P1, D1})) == (P2, D1)
    assert pair(fleet, avoid=frozenset({P1, P2}))[0] in (P1, P2)


def test_a_report_takes_over_what_was_sent_well_before_it() -> None:
    view = view_of(fleet_of(D1), D1)
    view.note("old", 9.0, 0, 1, 5)
    view.note("new", 9.98, 0, 1, 7)
    report(view, 5, running=1, free_blocks=80)
    assert (view.sequences, view.free_blocks) == (2, 73)
    report(view, 4, running=9)
    assert view.load.sequence == 5


def test_an_older_role_epoch_changes_nothing() -> None:
    fleet = Fleet()
    fleet.put(info(D1, role_epoch=3))
    fleet.put(info(D1, Role.MIXED, role_epoch=2))
    assert view_of(fleet, D1).info.role is Role.DECODE


def test_the_token_limit_is_that_of_the_best_worker() -> None:
    fleet = fleet_of(D1)
    fleet.put(info(D2, num_blocks=200, context_tokens=1000))
    assert fleet.token_limit(MODEL) == 800
    assert fleet.token_limit("other") == 0


def test_backoff_doubles_up_to_a_second_with_jitter() -> None:
    assert [backoff_s(n, 0.02, 0.0) for n in (1, 2, 3)] == [0.01, 0.02, 0.04]
    assert backoff_s(40, 0.02, 0.5) == 0.75


def test_the_retry_budget_follows_recent_requests() -> None:
    budget = RetryBudget(0.5, 1)
    assert [budget.take(0.0), budget.take(0.0)] == [True, False]
    for _ in range(4):
        budget.note_request(5.0)
    assert [budget.take(5.0), budget.take(5.0)] == [True, False]
    assert budget.take(10.0)  # the first retry is 10 s old
    assert not budget.take(10.0)
