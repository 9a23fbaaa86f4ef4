"""What is believed of a worker's speed: its profile, corrected by what is seen."""

from __future__ import annotations

import pytest

from tests.unit.router.stage import D1, P1, info
from weir.balance.profile import Fit, Profile
from weir.services.router.fleet import Load, WorkerView
from weir.services.router.speed import MAX_FACTOR, MAX_PAIRS, Factor, WorkerSpeed

PROFILE = Profile(
    "", "", 1, Fit((0.01, 0.001, 0.0), 1, 0, 9), Fit((0.02, 0.001, 0.0), 1, 0, 9), Fit((0.001, 1e-9), 1, 0, 9)
)


def test_predictions_are_the_profile_in_milliseconds() -> None:
    speed = WorkerSpeed(PROFILE)
    assert speed.prefill_ms(100, 0, 0.0) == pytest.approx(110.0)
    assert speed.prefill_ms(0, 500, 0.0) == 0.0
    assert speed.step_ms(10, 0, 0.0) == pytest.approx(30.0)
    assert speed.read_ms(1e9, "p", 0.0) == pytest.approx(1001.0)
    assert speed.read_ms(0, "p", 0.0) == 0.0
    assert speed.known


def test_a_worker_without_a_profile_is_known_once_it_was_seen() -> None:
    speed = WorkerSpeed(None)
    assert not speed.known
    for moment in range(3):
        speed.saw_prefill(100.0, 50, 0, float(moment))
        speed.saw_step(40.0, 1, 0, float(moment))
    assert speed.known
    assert speed.prefill_ms(50, 0, 2.0) == pytest.approx(100.0)
    assert speed.step_ms(1, 0, 2.0) == pytest.approx(40.0)


def test_a_worker_that_becomes_slow_is_seen_as_slow_within_seconds() -> None:
    speed = WorkerSpeed(PROFILE)
    now_s = 0.0
    for _ in range(40):
        speed.saw_step(21.0, 1, 0, now_s)
        now_s += 0.25
    assert speed.step_factor(now_s) == pytest.approx(1.0)
    for _ in range(8):  # two seconds of reports
        speed.saw_step(84.0, 1, 0, now_s)
        now_s += 0.25
    assert speed.step_factor(now_s) > 3.0
    for _ in range(8):
        speed.saw_step(21.0, 1, 0, now_s)
        now_s += 0.25
    assert speed.step_factor(now_s) < 1.2


def test_one_outlier_between_many_changes_little_and_factors_are_bounded() -> None:
    factor = Factor()
    for number in range(20):
        factor.observe(1.0, number * 0.1)
    factor.observe(4.0, 2.0)
    assert factor.at(2.0) < 1.5
    for number in range(50):
        factor.observe(1e9, 3.0 + number)
    assert factor.at(53.0) == pytest.approx(MAX_FACTOR)
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        factor.observe(bad, 60.0)
    assert factor.observations == 71


def test_what_was_seen_long_ago_is_believed_less() -> None:
    factor = Factor()
    factor.observe(50.0, 0.0)  # it stood still: one observation is worth no more than 4
    assert factor.at(0.5) == pytest.approx(4.0)
    assert factor.at(6.0) == pytest.approx(4.0 ** (1 / 2.718281828), rel=1e-3)
    assert factor.at(18.0) < 1.05


def test_reads_are_followed_by_pair_and_pairs_are_bounded() -> None:
    speed = WorkerSpeed(PROFILE)
    speed.saw_read(4004.0, 1e9, "far", 0.0)
    speed.saw_read(1001.0, 1e9, "near", 0.0)
    assert speed.read_ms(1e9, "far", 0.0) == pytest.approx(4004.0)
    assert speed.read_ms(1e9, "near", 0.0) == pytest.approx(1001.0)
    assert 1001.0 < speed.read_ms(1e9, "new", 0.0) < 4004.0
    for number in range(2 * MAX_PAIRS):
        speed.saw_read(1.0, 1e6, f"s{number}", 1.0)
    assert len(speed._pairs) == MAX_PAIRS


def report(sequence: int, **values: float) -> Load:
    base = {"running": 0, "waiting": 0, "pending_prefill_tokens": 0, "free_blocks": 100, "total_blocks": 100}
    return Load(sequence, **{**base, **values})  # type: ignore[arg-type]


def test_reports_correct_the_profile_only_by_work_done_since() -> None:
    view = WorkerView(info(D1, profile=PROFILE))
    view.take_report(report(1, running=1, decode_step_ms=21.0, generated_tokens=10), 0.0)
    view.take_report(report(2, running=1, decode_step_ms=63.0, generated_tokens=20), 1.0)
    assert view.speed.step_factor(1.0) == pytest.approx(3.0)
    view.take_report(report(3, running=0, decode_step_ms=63.0, generated_tokens=20), 2.0)
    assert view.speed._step.observations == 1

    view = WorkerView(info(P1, profile=PROFILE))
    rate = 256 / 0.266
    view.take_report(report(1, pending_prefill_tokens=5000, prefilled_tokens=1, prefill_tokens_per_s=rate), 0.0)
    view.take_report(report(2, pending_prefill_tokens=100, prefilled_tokens=900, prefill_tokens_per_s=rate / 2), 1.0)
    assert view.speed.prefill_factor(1.0) == pytest.approx(2.0)
    view.take_report(report(3, prefilled_tokens=950, prefill_tokens_per_s=rate / 9), 2.0)
    assert view.speed.prefill_factor(2.0) == pytest.approx(2.0)  # small prompts do not fill its chunks


def test_the_wait_shrinks_with_time_and_work_sent_counts_for_every_router() -> None:
    view = WorkerView(info(P1, profile=PROFILE))
    view.take_report(report(1, pending_prefill_tokens=1000, routers=3), 0.0)
    per_token = 266.0 / 256
    assert view.wait_ms(0.0) == pytest.approx(1000 * per_token)
    assert view.wait_ms(0.5) == pytest.approx(1000 * per_token - 500)
    assert view.wait_ms(9.0) == 0.0
    view.note("r", 9.0, 100, 0, 0)
    assert view.wait_ms(9.0) == pytest.approx(300 * per_token)
    assert view.pending_prefill_tokens == 1300
