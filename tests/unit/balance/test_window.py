"""The traffic window: exact rates and distributions, bounds, nonsense."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.balance.window import MAX_SAMPLES, Distribution, TrafficWindow
from weir.errors import InvalidArgument


def test_distribution_by_nearest_rank() -> None:
    assert Distribution.of([]) == Distribution()
    assert Distribution.of([3.0]) == Distribution(1, 3.0, 3.0, 3.0, 3.0)
    assert Distribution.of([float(i) for i in range(100, 0, -1)]) == Distribution(100, 50.5, 50.0, 90.0, 99.0)


def test_a_full_window_and_what_falls_out_of_it() -> None:
    window = TrafficWindow(span_s=10.0, bucket_s=1.0)
    window.start(0.0)
    for second in range(20):
        for _ in range(second):  # second s has s arrivals
            window.arrived(second + 0.5, 100 + second)
    now = window.snapshot(20.0)
    assert now.span_s == 10.0
    assert now.rate_per_s == pytest.approx(sum(range(10, 20)) / 10)
    assert now.arrivals == Distribution(10, 14.5, 14.0, 18.0, 19.0)
    assert now.isl.count == sum(range(10, 20))
    assert (now.isl.p99, now.osl.count) == (119, 0)
    assert window.snapshot(40.0).empty
    assert window.snapshot(40.0).isl == Distribution()


def test_a_young_window_is_measured_over_what_it_has() -> None:
    window = TrafficWindow(span_s=60.0)
    window.start(0.0)
    for index in range(8):
        window.arrived(index / 4, 10)
    assert window.snapshot(2.0).rate_per_s == 4.0
    assert window.snapshot(2.0).span_s == 2.0
    assert TrafficWindow().snapshot(0.0).empty


def test_hits_flows_and_latencies() -> None:
    window = TrafficWindow(span_s=10.0)
    window.start(0.0)
    window.prefilled(0.5, 1000, 0)
    window.prefilled(1.5, 1000, 600)
    window.decode_began(1.6, 1000)
    window.finished(3.0, 40, 0.25, 0.03)
    window.finished(3.1, 60, 0.0, 0.0)
    window.refused(3.2)
    now = window.snapshot(4.0)
    assert now.hit_ratio == pytest.approx(0.3)
    assert now.uncached.mean == 700
    assert (now.produced_tokens_per_s, now.admitted_tokens_per_s) == (500.0, 250.0)
    assert (now.osl.mean, now.ttft_s.count, now.ttft_s.p50, now.tpot_s.p50) == (50.0, 1, 0.25, 0.03)
    assert now.refused_per_s == 0.25


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_what_is_no_size_is_dropped_and_counted(value: float) -> None:
    window = TrafficWindow()
    window.arrived(0.0, value)
    window.arrived(value if value != -1.0 else math.nan, 5)
    window.prefilled(0.0, 5, value)
    window.decode_began(0.0, value)
    window.finished(0.0, 5, 0.1, value)
    assert window.dropped == 5
    assert window.snapshot(1.0).empty


def test_samples_are_bounded() -> None:
    window = TrafficWindow(span_s=60.0)
    for index in range(2 * MAX_SAMPLES):
        window.arrived(0.001 * index, index)
    now = window.snapshot(9.0)
    assert now.isl.count == MAX_SAMPLES
    assert now.isl.mean == MAX_SAMPLES + (MAX_SAMPLES - 1) / 2, "the newest are kept"
    assert now.rate_per_s == pytest.approx(2 * MAX_SAMPLES / 9, rel=1e-3), "rates count all"


@pytest.mark.parametrize(("span_s", "bucket_s"), [(0.0, 1.0), (10.0, 0.0), (1.0, 2.0), (math.nan, 1.0), (1e9, 1.0)])
def test_spans_are_checked(span_s: float, bucket_s: float) -> None:
    with pytest.raises(InvalidArgument):
        TrafficWindow(span_s=span_s, bucket_s=bucket_s)


@given(st.lists(st.floats(0, 100), max_size=200))
def test_every_arrival_is_counted_once(times: list[float]) -> None:
    window = TrafficWindow(span_s=200.0)
    window.start(0.0)
    for at_s in sorted(times):
        window.arrived(at_s, 1)
    assert window.snapshot(101.0).rate_per_s * 101 == pytest.approx(len(times))


def test_what_was_before_a_change_of_lengths_is_forgotten() -> None:
    window = TrafficWindow(span_s=60.0)
    rng = random.Random(1)
    for tick in range(600):  # 10 requests a second for a minute
        window.arrived(tick / 10, rng.lognormvariate(math.log(4_000), 0.5))
        assert math.isinf(window.snapshot(tick / 10).changed_s)
    for tick in range(600, 720):
        window.arrived(tick / 10, rng.lognormvariate(math.log(300), 0.5))
        found = window.snapshot(tick / 10)
    assert found.isl.mean == pytest.approx(340, rel=0.15)
    assert 70 <= found.isl.count <= 120, "those of the last eighth of the window, and what came since"
    assert 8.0 <= found.changed_s <= 11.0, "it was noticed within four seconds"


@pytest.mark.parametrize("seed", range(4))
def test_chance_is_no_change(seed: int) -> None:
    """Long tails, 5 requests a second for half an hour."""
    window, rng = TrafficWindow(span_s=60.0), random.Random(seed)
    for tick in range(9_000):
        window.arrived(tick / 5, rng.lognormvariate(math.log(1_000), 1.2))
        if tick % 5 == 0:
            assert math.isinf(window.snapshot(tick / 5).changed_s), f"seed {seed}"


def test_the_beginning_of_traffic_is_no_change() -> None:
    """Short answers are the first to end: until a whole window was seen, what ends says little about what runs."""
    window = TrafficWindow(span_s=60.0)
    for tick in range(599):  # 10 requests a second, whose lengths look longer by and by
        length = 20 if tick < 150 else 400
        window.arrived(tick / 10, length)
        assert math.isinf(window.snapshot(tick / 10).changed_s)
