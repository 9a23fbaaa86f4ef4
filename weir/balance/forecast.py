"""What the arrival rate will be: constant, or Holt-Winters with a season; each with its own error shown.

A forecaster is fed one value per bucket of time. ``error`` is the mean absolute percentage error (MAPE) of the
forecasts that it made before it saw the values, at the horizon that they are used for; it is infinite until there are
some.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from weir.errors import InvalidArgument

ERROR_WINDOW = 120
"""Forecasts over which the error is taken."""
MIN_JUDGED = 10
"""Fewer forecasts than this say nothing about a method."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """The rate expected ``steps`` buckets ahead, by which method, and how wrong that method was lately."""

    value: float
    error: float
    method: str


class Forecaster(Protocol):
    """``observe`` each bucket in order, then ask."""

    @property
    def name(self) -> str:
        """The method."""
        ...

    def observe(self, value: float) -> None:
        """Take in the next bucket. A value that is not finite or is negative repeats what was expected."""
        ...

    def predict(self, steps: int) -> float:
        """The value ``steps`` >= 1 buckets ahead, at least 0; 0 before the first value."""
        ...


class Constant:
    """The mean of the last ``memory`` values goes on."""

    def __init__(self, memory: int = 30) -> None:
        if memory < 1:
            raise InvalidArgument("memory", memory, "must be at least 1")
        self._values: deque[float] = deque(maxlen=memory)

    @property
    def name(self) -> str:
        """The method."""
        return "constant"

    def observe(self, value: float) -> None:
        """See Forecaster."""
        if math.isfinite(value) and value >= 0:
            self._values.append(value)

    def predict(self, steps: int) -> float:
        """See Forecaster."""
        return math.fsum(self._values) / len(self._values) if self._values else 0.0


class HoltWinters:
    """Level, damped trend and additive season of ``season`` buckets (0: none), by exponential smoothing.

    The first season fixes the seasonal terms, as usual; until then only level and trend are used. Source: Hyndman and
    Athanasopoulos, Forecasting: Principles and Practice, 8.2 to 8.3.
    """

    def __init__(
        self, season: int = 0, *, level: float = 0.2, trend: float = 0.02, seasonal: float = 0.2, damping: float = 0.95
    ) -> None:
        if season < 0 or season == 1:
            raise InvalidArgument("season", season, "must be 0 or at least 2 buckets")
        for name, value in (("level", level), ("trend", trend), ("seasonal", seasonal), ("damping", damping)):
            if not 0 <= value <= 1:
                raise InvalidArgument(name, value, "must lie in [0, 1]")
        self._season, self._alpha, self._beta, self._gamma, self._phi = season, level, trend, seasonal, damping
        self._level = 0.0
        self._trend = 0.0
        self._terms: list[float] = []
        self._first: list[float] = []
        self._count = 0

    @property
    def name(self) -> str:
        """The method."""
        return f"Holt-Winters, season {self._season}" if self._season else "Holt, damped trend"

    def observe(self, value: float) -> None:
        """See Forecaster."""
        if not (math.isfinite(value) and value >= 0):
            value = self.predict(1)
        term = self._term(0)
        if self._count == 0:
            self._level = value
        else:
            before, carried = self._level, self._phi * self._trend
            self._level = self._alpha * (value - term) + (1 - self._alpha) * (before + carried)
            self._trend = self._beta * (self._level - before) + (1 - self._beta) * carried
        if self._terms:
            place = self._count % self._season
            self._terms[place] = self._gamma * (value - self._level) + (1 - self._gamma) * term
        self._count += 1
        if self._season and not self._terms:
            self._begin_season(value)

    def _begin_season(self, value: float) -> None:
        self._first.append(value)
        if len(self._first) == self._season:
            mean = math.fsum(self._first) / self._season
            self._terms = [one - mean for one in self._first]
            self._level, self._trend = mean, 0.0
            self._first = []

    def _term(self, ahead: int) -> float:
        return self._terms[(self._count + ahead) % self._season] if self._terms else 0.0

    def predict(self, steps: int) -> float:
        """See Forecaster."""
        assert steps >= 1, steps
        damped = steps * self._phi if self._phi == 1 else self._phi * (1 - self._phi**steps) / (1 - self._phi)
        value = self._level + damped * self._trend + self._term(steps - 1)
        return max(0.0, value) if math.isfinite(value) else 0.0


class _Judged:
    """A forecaster and the forecasts it has still to answer for."""

    def __init__(self, inner: Forecaster, horizon: int) -> None:
        self.inner = inner
        self._open: deque[float] = deque(maxlen=horizon)
        self._horizon = horizon
        self._errors: deque[tuple[float, float]] = deque(maxlen=ERROR_WINDOW)

    @property
    def error(self) -> float:
        """MAPE weighted by the values, so that empty buckets do not divide by 0; inf until it can be told."""
        total = math.fsum(actual for _, actual in self._errors)
        if len(self._errors) < MIN_JUDGED or total <= 0:
            return math.inf
        return math.fsum(miss for miss, _ in self._errors) / total

    def observe(self, value: float, actual: float) -> None:
        if len(self._open) == self._horizon:
            expected = self._open.popleft()
            self._errors.append((abs(expected - actual), actual))
        self.inner.observe(value)
        self._open.append(self.inner.predict(self._horizon))


class ForecastPanel:
    """Several methods side by side; the one that was least wrong speaks, the first one until they can be judged.

    What a forecast is compared with is the mean of the last ``smooth`` values: single buckets of random arrivals differ
    from any rate. A later method must beat the first by ``margin`` of its error.
    """

    def __init__(
        self, methods: Sequence[Forecaster], *, horizon: int = 1, smooth: int = 10, margin: float = 0.1
    ) -> None:
        if not methods:
            raise InvalidArgument("methods", len(methods), "at least one")
        if horizon < 1 or smooth < 1:
            raise InvalidArgument("horizon, smooth", (horizon, smooth), "must be at least 1")
        self._judged = [_Judged(method, horizon) for method in methods]
        self._recent: deque[float] = deque(maxlen=smooth)
        self._horizon = horizon
        self._margin = margin

    def observe(self, value: float) -> None:
        """Take in the next bucket; values that are no rate are passed over."""
        if not (math.isfinite(value) and value >= 0):
            return
        self._recent.append(value)
        actual = math.fsum(self._recent) / len(self._recent)
        for judged in self._judged:
            judged.observe(value, actual)

    def forecast(self) -> Forecast:
        """What the best method says of ``horizon`` buckets ahead."""
        best = self._judged[0]
        for judged in self._judged[1:]:
            if judged.error < best.error * (1 - self._margin):
                best = judged
        return Forecast(best.inner.predict(self._horizon), best.error, best.inner.name)

    def errors(self) -> dict[str, float]:
        """The error of every method."""
        return {judged.inner.name: judged.error for judged in self._judged}
