"""Workers that fail, and workers that are slow, are left alone for a while."""

from __future__ import annotations

from tests.unit.router.stage import MODEL, info
from weir.ids import WorkerKey
from weir.lifecycle import Role
from weir.services.router.fleet import Fleet, WorkerView
from weir.services.router.health import FIRST_PAUSE_S, MAX_PAUSE_S, PROBE_S, Breaker
from weir.services.router.outliers import PAUSE_S, Outliers


def test_failures_in_a_row_open_it_and_a_success_between_does_not() -> None:
    breaker = Breaker()
    breaker.failed(0.0)
    breaker.failed(0.0)
    assert breaker.allows(0.0)
    for _ in range(20):
        breaker.succeeded()
    breaker.failed(0.0)
    breaker.failed(0.0)
    assert breaker.allows(0.0)
    breaker.failed(0.0)
    assert not breaker.allows(0.0)
    assert breaker.opened == 1


def test_half_open_one_request_tries_and_decides() -> None:
    breaker = Breaker()
    for _ in range(3):
        breaker.failed(0.0)
    now_s = FIRST_PAUSE_S
    assert breaker.allows(now_s)
    breaker.sent(now_s)
    assert not breaker.allows(now_s)
    breaker.failed(now_s)
    assert not breaker.allows(now_s + 1.5 * FIRST_PAUSE_S)
    now_s += 2 * FIRST_PAUSE_S
    assert breaker.allows(now_s)
    breaker.sent(now_s)
    breaker.succeeded()
    assert breaker.allows(now_s)
    breaker.sent(now_s)
    assert breaker.allows(now_s)


def test_a_probe_that_is_never_heard_of_is_not_waited_for_and_pauses_are_bounded() -> None:
    breaker = Breaker()
    now_s = 0.0
    for _ in range(3):
        breaker.failed(now_s)
    for _ in range(12):
        now_s = breaker.open_until_s
        breaker.sent(now_s)
        assert not breaker.allows(now_s + PROBE_S / 2)
        assert breaker.allows(now_s + PROBE_S)
        breaker.failed(now_s)
        assert breaker.open_until_s - now_s <= MAX_PAUSE_S
    assert breaker.open_until_s - now_s == MAX_PAUSE_S


def test_what_was_under_way_when_it_opened_does_not_make_the_pause_longer() -> None:
    breaker = Breaker()
    for _ in range(50):
        breaker.failed(0.0)
    assert breaker.open_until_s == FIRST_PAUSE_S


def test_half_of_many_failing_opens_it_too() -> None:
    breaker = Breaker()
    for _ in range(30):
        breaker.failed(0.0)
        breaker.failed(0.0)
        breaker.succeeded()
    assert breaker.opened > 0


def workers(count: int) -> tuple[Fleet, list[WorkerView]]:
    fleet = Fleet()
    views = []
    for number in range(count):
        view = fleet.put(info(WorkerKey(f"d{number}", 1), Role.DECODE))
        view.connected = True
        views.append(view)
    return fleet, views


def slow(view: WorkerView, factor: float) -> None:
    for _ in range(3):
        view.speed._step.observe(factor, 0.0)


def test_a_worker_far_slower_than_its_peers_is_ejected_and_tried_again() -> None:
    fleet, views = workers(6)
    for view, factor in zip(views, (1.0, 1.0, 6.0, 1.0, 2.0, 1.0), strict=True):
        slow(view, factor)
    outliers = Outliers()
    outliers.look(MODEL, fleet.serving(MODEL), 0.5)
    assert [view.breaker.allows(0.5) for view in views] == [True, True, False, True, True, True]
    assert outliers.ejected == 1
    assert views[2].breaker.allows(0.5 + PAUSE_S)
    views[2].breaker.sent(11.0)
    assert not views[2].breaker.allows(11.0)


def test_at_most_a_third_of_a_role_is_ejected_and_none_of_two() -> None:
    fleet, views = workers(6)
    for view in views[:3]:
        slow(view, 9.0)
    for view in views[3:]:
        slow(view, 1.0)
    slow(views[0], 50.0)
    Outliers().look(MODEL, fleet.serving(MODEL), 0.5)
    assert sum(not view.breaker.allows(0.5) for view in views) <= 2
    fleet, views = workers(2)
    slow(views[0], 60.0)
    Outliers().look(MODEL, fleet.serving(MODEL), 0.5)
    assert all(view.breaker.allows(0.5) for view in views)


def test_a_worker_of_which_nothing_was_seen_for_long_is_believed_to_be_like_its_peers() -> None:
    fleet, views = workers(3)
    slow(views[0], 9.0)
    outliers = Outliers()
    for now_s in (20.0, 40.0):
        for view in views[1:]:
            for _ in range(3):
                view.speed._step.observe(0.5, now_s)
        outliers.look(MODEL, fleet.serving(MODEL), now_s + 0.5)
    assert 0.49 < views[0].speed.step_factor(40.5) < 0.52
    for tick in range(300):  # nobody is seen: in the end the profile is believed
        outliers.look(MODEL, fleet.serving(MODEL), 60.0 + tick)
    assert all(0.98 < view.speed.step_factor(360.0) < 1.02 for view in views)
