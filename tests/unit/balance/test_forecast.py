"""Forecasts: exact on what they can know, honest about their error on what they cannot."""

from __future__ import annotations

import math
import random

import pytest

from weir.balance.forecast import Constant, ForecastPanel, HoltWinters
from weir.errors import InvalidArgument


def test_constant_is_the_mean_of_its_memory() -> None:
    method = Constant(memory=3)
    assert method.predict(1) == 0.0
    for value in (100, 1, 2, 6, math.nan, -5):
        method.observe(value)
    assert method.predict(1) == method.predict(99) == 3.0


def test_a_flat_series_is_forecast_exactly() -> None:
    for method in (HoltWinters(), HoltWinters(4), Constant()):
        for _ in range(40):
            method.observe(7.0)
        assert method.predict(5) == pytest.approx(7.0), method.name


def test_a_season_is_learnt() -> None:
    method = HoltWinters(24)
    shape = [10 + 5 * math.sin(2 * math.pi * hour / 24) for hour in range(24)]
    for day in range(4):
        for value in shape:
            method.observe(value)
        if day:
            for ahead in (1, 6, 12, 24):
                assert method.predict(ahead) == pytest.approx(shape[(ahead - 1) % 24], abs=0.05)


def test_a_trend_is_followed_and_damped() -> None:
    method = HoltWinters(level=0.5, trend=0.2, damping=0.9)
    for value in range(100):
        method.observe(float(value))
    assert 97 < method.predict(1) < 101
    assert method.predict(10) > method.predict(1)
    assert method.predict(1000) < 120, "a trend does not go on for ever"


def test_forecasts_are_rates_whatever_comes() -> None:
    method = HoltWinters(3)
    for value in (9.0, 0.0, math.nan, math.inf, -4.0, 0.0, 0.0, 0.0, 0.0):
        method.observe(value)
        assert math.isfinite(method.predict(3))
        assert method.predict(3) >= 0.0


def test_the_panel_lets_the_least_wrong_speak_and_shows_the_errors() -> None:
    panel = ForecastPanel([Constant(30), HoltWinters(60)], horizon=5, smooth=1)
    assert panel.forecast().error == math.inf
    for second in range(600):
        panel.observe(20 + 15 * math.sin(2 * math.pi * second / 60))
    best = panel.forecast()
    assert best.method == "Holt-Winters, season 60"
    assert best.error < 0.02
    assert panel.errors()["constant"] > 0.3
    assert best.value == pytest.approx(20 + 15 * math.sin(2 * math.pi * 604 / 60), abs=0.5)


def test_noise_alone_leaves_every_method_a_small_error() -> None:
    source = random.Random(4)
    panel = ForecastPanel([Constant(30), HoltWinters()], horizon=5)
    for _ in range(400):
        panel.observe(float(sum(source.random() < 0.1 for _ in range(100))))
    assert panel.forecast().value == pytest.approx(10, rel=0.2)
    assert all(error < 0.15 for error in panel.errors().values())


@pytest.mark.parametrize(
    "make",
    [
        lambda: HoltWinters(1),
        lambda: HoltWinters(level=1.5),
        lambda: HoltWinters(damping=math.nan),
        lambda: Constant(0),
        lambda: ForecastPanel([]),
        lambda: ForecastPanel([Constant()], horizon=0),
    ],
)
def test_bad_settings_are_refused(make: object) -> None:
    assert callable(make)
    with pytest.raises(InvalidArgument):
        make()
