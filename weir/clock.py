"""The only file that reads the time. Everything else is given a ``Clock``."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Two times: ``monotonic_s`` for durations and deadlines in one process, ``unix_s`` for what is shown."""

    def monotonic_s(self) -> float:
        """Seconds from an arbitrary start; never goes back."""
        ...

    def unix_s(self) -> float:
        """Seconds since 1970-01-01 UTC; may jump."""
        ...


class SystemClock:
    """The machine's clocks. On Linux the monotonic clock is shared by all processes of a machine."""

    def monotonic_s(self) -> float:
        return time.monotonic()

    def unix_s(self) -> float:
        return time.time()


class ManualClock:
    """A clock that moves only when told; the twin for tests and simulation."""

    def __init__(self, start_s: float = 0.0, unix_start_s: float = 1_700_000_000.0) -> None:
        self._now_s = start_s
        self._unix_offset_s = unix_start_s - start_s

    def monotonic_s(self) -> float:
        return self._now_s

    def unix_s(self) -> float:
        return self._now_s + self._unix_offset_s

    def advance(self, seconds: float) -> None:
        """Move on by ``seconds`` >= 0."""
        assert seconds >= 0, seconds
        self._now_s += seconds
