"""Sizing: golden values through the SLO path, whole workers, and when mixed wins."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.balance.observe import Links, Speed
from weir.balance.sizing import Roles, Slo, fabric_of, size
from weir.errors import InvalidArgument

SPEED = Speed(prefill_tokens_per_s=10_000, step_base_s=0.03, max_batch=64)


def test_the_golden_split() -> None:
    sizing = size(SPEED, Slo(), isl=4096, uncached=4096, osl=512)
    assert sizing.work.prefill_s == pytest.approx(0.4096)
    assert sizing.work.decode_s == pytest.approx(0.24)
    assert sizing.work.prefill_share == pytest.approx(0.630542, abs=5e-7)
    split = sizing.best_split(16)
    assert (split.prefill, split.decode) == (10, 6)
    assert sizing.capacity(Roles(10, 6)) == pytest.approx(24.6305 * (1 - split.loss), abs=1e-3)


def test_the_ttft_reserves_rate_against_queueing() -> None:
    speed = replace(SPEED, prefill_tokens_per_s=28_300)
    sizing = size(speed, Slo(ttft_s=2, overhead_s=0.1), isl=6144, uncached=6144, osl=10)
    assert sizing.prefill_tokens_per_s == pytest.approx(25_066, abs=1)
    hopeless = size(speed, Slo(ttft_s=0.2), isl=6144, uncached=6144, osl=10)
    assert hopeless.notes == ("TTFT 200 ms is below one prefill of 217 ms",)
    assert hopeless.prefill_tokens_per_s == 28_300


def test_the_tpot_and_the_memory_bound_the_batch() -> None:
    speed = Speed(10_000, 0.01, 0.001, 1e-6, max_batch=64, kv_tokens=100_000)
    free = size(speed, Slo(), isl=1000, uncached=1000, osl=200)
    assert free.batch == 64, "memory holds 83"
    bound = size(speed, Slo(tpot_s=0.03), isl=1000, uncached=1000, osl=200)
    assert bound.batch == 9, "0.01 + 9 (0.001 + 1100e-6) = 0.0289"
    assert size(speed, Slo(), isl=9000, uncached=9000, osl=1000).batch == 10
    slow = size(speed, Slo(tpot_s=0.005), isl=1000, uncached=1000, osl=200)
    assert slow.batch == 1
    assert slow.notes == ("TPOT 5 ms is below one step of 12.1 ms",)


def test_cached_tokens_are_no_work() -> None:
    cold = size(SPEED, Slo(), isl=4000, uncached=4000, osl=100)
    warm = size(SPEED, Slo(), isl=4000, uncached=1000, osl=100)
    assert warm.work.prefill_s == pytest.approx(cold.work.prefill_s / 4)
    assert warm.work.decode_s == cold.work.decode_s


def test_without_a_tpot_mixed_always_wins_and_with_a_tight_one_the_split_does() -> None:
    speed = Speed(10_000, 0.02, 0.0002, max_batch=64)
    loose = size(speed, Slo(), isl=4000, uncached=4000, osl=200)
    assert loose.split_gain(4) < 0, "nothing to gain, rounding to lose"
    tight = size(speed, Slo(tpot_s=0.025), isl=4000, uncached=4000, osl=200)
    assert tight.split_gain(4) > 0.3
    assert tight.mixed_worker_rate < loose.mixed_worker_rate


def test_mixed_workers_fill_in_on_either_side() -> None:
    sizing = size(SPEED, Slo(), isl=4096, uncached=4096, osl=512)
    t_p, t_d = sizing.work.prefill_s, sizing.work.decode_s
    assert sizing.capacity(Roles(1, 1)) == pytest.approx(min(1 / t_p, 1 / t_d))
    assert sizing.capacity(Roles(1, 1, 1)) == pytest.approx(3 / (t_p + t_d))
    assert sizing.capacity(Roles(3, 0, 1)) == pytest.approx(1 / t_d)
    assert sizing.capacity(Roles(2, 0)) == 0.0
    assert sizing.capacity(Roles(mixed=3)) == pytest.approx(3 * sizing.mixed_worker_rate)


def test_workers_for_a_rate() -> None:
    sizing = size(SPEED, Slo(), isl=4096, uncached=4096, osl=512)
    found = sizing.workers_for(24.0, 100, mixed=False)
    assert found == 16
    assert sizing.workers_for(24.0, 15, mixed=False) is None
    assert sizing.workers_for(0.0, 3, mixed=False) == 2
    assert sizing.workers_for(0.0, 3, mixed=True) == 1


def test_fabric_of_a_split() -> None:
    speed = replace(SPEED, prefill_tokens_per_s=7_100, bytes_per_token=819_200)
    sizing = size(speed, Slo(), isl=1000, uncached=1000, osl=100)
    check = fabric_of(sizing, Roles(1, 1), speed, Links(25e9 / 8, 25e9 / 8))
    assert check is not None
    assert not check.holds
    assert fabric_of(sizing, Roles(1, 1), speed, Links()) is None
    assert fabric_of(sizing, Roles(mixed=2), speed, Links(1, 1)) is None


@pytest.mark.parametrize("bad", [{"isl": 0.0}, {"osl": -1.0}, {"isl": math.nan}])
def test_nonsense_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(InvalidArgument):
        size(SPEED, Slo(), **({"isl": 10.0, "uncached": 10.0, "osl": 10.0} | bad))
    with pytest.raises(InvalidArgument):
        size(replace(SPEED, prefill_tokens_per_s=0.0), Slo(), isl=1, uncached=1, osl=1)


@given(st.floats(0.01, 0.2), st.floats(16, 20_000), st.floats(2, 4_000), st.floats(1e-5, 5e-3))
def test_more_patience_never_carries_less(tpot_s: float, isl: float, osl: float, per_sequence_s: float) -> None:
    speed = Speed(10_000, 0.005, per_sequence_s, max_batch=64)
    rates = []
    for factor in (1.0, 1.5, 4.0, math.inf):
        sizing = size(speed, Slo(tpot_s=tpot_s * factor), isl=isl, uncached=isl, osl=osl)
        rates.append((sizing.mixed_worker_rate, sizing.capacity(Roles(1, 1))))
        assert (
            sizing.mixed_worker_rate <= 1 / (sizing.work.prefill_s + sizing.work.decode_s) * (1 + 1e-9) or factor == 1
        )
    assert [a for a, _ in rates] == sorted(a for a, _ in rates)
    assert [b for _, b in rates] == sorted(b for _, b in rates)
