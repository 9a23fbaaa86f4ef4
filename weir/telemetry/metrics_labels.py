"""Label values of metrics: few, whatever comes in. Pure.

Everything that a client, a worker or a transport may choose freely becomes a label only through these.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

PATHS = ("disaggregated", "local", "mixed")
"""Prefilled on one worker and decoded on another; prefilled on the decode worker; on a mixed worker."""
OTHER = "other"


class Ranges:
    """Whole numbers by the range they lie in, e.g. ``1-128``, ``129-512``, ``513+``."""

    def __init__(self, edges: Sequence[int]) -> None:
        """``edges``: the largest number of each range but the last, rising."""
        assert list(edges) == sorted(set(edges)), edges
        self._edges = tuple(edges)
        lows = (0, *(edge + 1 for edge in edges))
        closed = [str(high) if low == high else f"{low}-{high}" for low, high in zip(lows, edges, strict=False)]
        self.labels = (*closed, f"{lows[-1]}+")

    def index(self, value: int) -> int:
        """Index in ``labels``."""
        return bisect_left(self._edges, value)

    def label(self, value: int) -> str:
        """The name of the range of ``value``."""
        return self.labels[self.index(value)]


INPUT_TOKENS = Ranges((128, 512, 2_048, 8_192, 32_768))
CONCURRENCY = Ranges((1, 2, 4, 8, 16, 32, 64, 128))


class Bounded:
    """Passes on the first ``limit`` different values; any further one is OTHER."""

    def __init__(self, limit: int, known: Iterable[str] = ()) -> None:
        self._known = set(known)
        self._limit = limit
        assert len(self._known) <= limit, "what is known must fit"

    def __call__(self, value: str) -> str:
        """``value``, or OTHER."""
        if value in self._known:
            return value
        if len(self._known) >= self._limit:
            return OTHER
        self._known.add(value)
        return value
