"""A process's own clocks: both drift against the true time, and its wall clock is off."""

from __future__ import annotations

from collections.abc import Callable


class SimClock:
    """``rate`` near 1; ``offset_s`` of the monotonic clock and ``skew_s`` of the wall clock at time 0."""

    def __init__(self, true_time: Callable[[], float], *, rate: float, offset_s: float, skew_s: float) -> None:
        self._true_time = true_time
        self._rate = rate
        self._offset_s = offset_s
        self._unix_start_s = 1_700_000_000.0 + skew_s

    def monotonic_s(self) -> float:
        return self._offset_s + self._true_time() * self._rate

    def unix_s(self) -> float:
        return self._unix_start_s + self._true_time() * self._rate
