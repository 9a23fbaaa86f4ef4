"""Profiles are fitted, stored and refused as their docstrings say."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.balance.profile import (
    Profile,
    fit,
    prefill_features,
    profile_from_json,
    read_features,
    step_features,
)
from weir.errors import InvalidArgument

SIZES = [(t, c) for t in (16, 64, 256, 1024) for c in (0, 256, 1024)]


def profile() -> Profile:
    prefill = fit(
        [prefill_features(t, c) for t, c in SIZES], [1e-3 + 2e-4 * t + 1e-8 * t * (c + t / 2) for t, c in SIZES]
    )
    batches = [(b, b * k) for b in (1, 4, 16) for k in (64, 512)]
    step = fit([step_features(*x) for x in batches], [0.02 + 1e-3 * b + 1e-6 * k for b, k in batches])
    read = fit([read_features(n) for n in (1e5, 1e6, 1e7)], [5e-4 + n / 4e9 for n in (1e5, 1e6, 1e7)])
    return Profile("00ff", "cpu", 1, prefill, step, read)


def test_exact_models_are_recovered() -> None:
    made = profile()
    assert made.prefill.coefficients == pytest.approx((1e-3, 2e-4, 1e-8), rel=1e-6)
    assert made.step.coefficients == pytest.approx((0.02, 1e-3, 1e-6), rel=1e-6)
    assert made.read.coefficients == pytest.approx((5e-4, 1 / 4e9), rel=1e-6)
    assert made.prefill.r_squared == pytest.approx(1.0)
    assert made.prefill.max_residual < 1e-9
    assert made.prefill_s(1024, 256) == pytest.approx(1e-3 + 0.2048 + 1e-8 * 1024 * 768)
    assert made.step_s(8, 2048) == pytest.approx(0.02 + 0.008 + 0.002048)
    assert made.read_s(4e9) == pytest.approx(1.0005)
    assert made.prefill_s(0) == made.step_s(0, 0) == made.read_s(0) == 0.0


def test_what_is_stored_is_what_comes_back() -> None:
    made = profile()
    assert profile_from_json(made.to_json()) == made


@given(st.integers(0, 10_000))
def test_noise_never_makes_more_work_cheaper(seed: int) -> None:
    source = random.Random(seed)
    times = [1e-6 * t * source.uniform(0.1, 10) for t, _ in SIZES]
    fitted = fit([prefill_features(t, c) for t, c in SIZES], times)
    assert min(fitted.coefficients) >= 0
    assert max(fitted.coefficients) > 0


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("{", "p"),
        ("[]", "p.version"),
        ('{"version": 99}', "p.version"),
        ('{"version": 1}', "p"),
    ],
)
def test_corrupt_profiles_are_refused_by_name(text: str, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        profile_from_json(text, source="p")
    assert caught.value.field == field


@pytest.mark.parametrize("value", ["NaN", "-1.0", "Infinity"])
def test_coefficients_out_of_range_are_refused(value: str) -> None:
    text = profile().to_json()
    start = text.index('"prefill"')
    first = text.index("[", start)
    broken = text[: first + 1] + value + "," + text[text.index(",", first) + 1 :]
    with pytest.raises(InvalidArgument, match="finite coefficients"):
        profile_from_json(broken)


def test_too_few_or_impossible_measurements_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="measurements"):
        fit([(1.0, 2.0)], [1.0])
    with pytest.raises(InvalidArgument, match="seconds"):
        fit([(1.0, 2.0), (1.0, 3.0)], [1.0, float("nan")])
