"""Whether something grows with the number of requests. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Reading:
    """A process after ``requests`` requests."""

    requests: int
    rss_bytes: int
    open_files: int


@dataclass(frozen=True, slots=True)
class Growth:
    """From the first reading to the last; ``bytes_per_request`` is the slope of a straight line through the second
    half of the readings, where what fills up once has filled up."""

    rss_first: int
    rss_last: int
    files_first: int
    files_last: int
    bytes_per_request: float


def growth(readings: Sequence[Reading]) -> Growth:
    """At least two readings with different request counts."""
    assert len(readings) >= 2, len(readings)
    half = readings[min(len(readings) // 2, len(readings) - 2) :]
    slope = float(np.polyfit([r.requests for r in half], [r.rss_bytes for r in half], 1)[0])
    first, last = readings[0], readings[-1]
    return Growth(first.rss_bytes, last.rss_bytes, first.open_files, last.open_files, slope)
