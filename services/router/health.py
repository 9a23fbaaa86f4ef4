"""When a worker is left alone for a while: a circuit breaker on its errors. Pure.

closed ── failures in a row, or too large a share of them ──► open ── after a pause ──► half-open: one request
   ▲                                                            ▲                            │
   └──────────────── it succeeds ───────────────────────────────┴───── it fails: longer ─────┘
"""

from __future__ import annotations

IN_A_ROW = 3
FAILED_SHARE = 0.5
LEAST_OUTCOMES = 5.0
"""Recent outcomes, weighted by DECAY, from which on their share counts."""
DECAY = 0.9
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 30.0
PROBE_S = 10.0
"""A probe that has neither succeeded nor failed by then is no longer waited for."""


class Breaker:
    """Of one worker. Refusals for lack of room are no failures."""

    __slots__ = ("_failed", "_in_a_row", "_outcomes", "_pause_s", "_probe_until_s", "open_until_s", "opened")

    def __init__(self) -> None:
        self.open_until_s = 0.0
        self.opened = 0
        """How often it opened."""
        self._failed = 0.0
        self._outcomes = 0.0
        self._in_a_row = 0
        self._pause_s = 0.0
        self._probe_until_s = 0.0

    def allows(self, now_s: float) -> bool:
        """Whether the worker may be given a request now; half-open, one at a time."""
        if not self._pause_s:
            return True
        return now_s >= self.open_until_s and now_s >= self._probe_until_s

    def state(self, now_s: float) -> str:
        """``closed``, ``open`` or ``half_open``."""
        if not self._pause_s:
            return "closed"
        return "open" if now_s < self.open_until_s else "half_open"

    def sent(self, now_s: float) -> None:
        """A request was sent there."""
        if self._pause_s:
            self._probe_until_s = now_s + PROBE_S

    def succeeded(self) -> None:
        """It did what it was asked to do."""
        self._count(0.0)
        self._in_a_row = 0
        if self._pause_s and self._probe_until_s:
            self._pause_s = self._probe_until_s = self.open_until_s = 0.0
            self._failed = self._outcomes = 0.0

    def failed(self, now_s: float) -> None:
        """It failed a request."""
        self._count(1.0)
        self._in_a_row += 1
        often = self._outcomes >= LEAST_OUTCOMES and self._failed >= FAILED_SHARE * self._outcomes
        if now_s < self.open_until_s:
            return  # of those that were under way when it opened
        if self._pause_s or often or self._in_a_row >= IN_A_ROW:
            self._pause_s = min(self._pause_s * 2 or FIRST_PAUSE_S, MAX_PAUSE_S)
            self.open_until_s = now_s + self._pause_s
            self._probe_until_s = 0.0
            self.opened += 1

    def eject(self, now_s: float, pause_s: float) -> None:
        """Leave it alone for a while, whatever it did; then one request tries."""
        self._pause_s = max(self._pause_s, FIRST_PAUSE_S)
        self.open_until_s = max(self.open_until_s, now_s + pause_s)
        self._probe_until_s = 0.0
        self.opened += 1

    def _count(self, failed: float) -> None:
        self._failed = self._failed * DECAY + failed
        self._outcomes = self._outcomes * DECAY + 1.0
