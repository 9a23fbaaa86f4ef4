"""When to try again, and when not: back-off with jitter, and a budget that stops retry storms. Pure."""

from __future__ import annotations

from collections import deque

MAX_BACKOFF_S = 1.0
WINDOW_S = 10.0


def backoff_s(failures: int, first_s: float, jitter: float) -> float:
    """Wait before the retry after ``failures`` >= 1: doubles each time, times 0.5 to 1 by ``jitter`` in [0, 1)."""
    assert failures >= 1
    longest = min(first_s * 2.0 ** min(failures - 1, 32), MAX_BACKOFF_S)
    return longest * (0.5 + 0.5 * jitter)


class RetryBudget:
    """Retries may be ``share`` of the requests of the last 10 s, and always ``minimum``.

    Only failures reported by living workers are charged: a dead worker's requests must move, and moving
    them adds no load to what made them fail.
    """

    def __init__(self, share: float, minimum: int) -> None:
        self._share = share
        self._minimum = minimum
        self._requests: deque[float] = deque()
        self._retries: deque[float] = deque()

    def note_request(self, now_s: float) -> None:
        """A request was admitted."""
        self._requests.append(now_s)
        self._forget(self._requests, now_s)

    def take(self, now_s: float) -> bool:
        """Whether one more retry is allowed now; if so it is counted."""
        self._forget(self._requests, now_s)
        self._forget(self._retries, now_s)
        if len(self._retries) >= max(self._minimum, self._share * len(self._requests)):
            return False
        self._retries.append(now_s)
        return True

    @staticmethod
    def _forget(times: deque[float], now_s: float) -> None:
        while times and times[0] <= now_s - WINDOW_S:
            times.popleft()
