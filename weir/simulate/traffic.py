"""Who asks what, when. Random streams are numpy generators made from the seeds given."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from weir.errors import InvalidArgument

BATCH = 4096


class Arrival(NamedTuple):
    """One request: moment, tokens of the prompt and of the output, prompt tokens that are cached."""

    at_s: float
    prompt: int
    output: int
    cached: int = 0


@dataclass(frozen=True, slots=True)
class Phase:
    """``seconds`` of traffic. Lengths are log-normal with these means; ``spread`` is their coefficient of variation."""

    seconds: float
    rate: float
    isl: float
    osl: float
    spread: float = 0.5
    burstiness: float = 1.0

    def __post_init__(self) -> None:
        for name in ("seconds", "isl", "osl", "burstiness"):
            if not getattr(self, name) > 0:
                raise InvalidArgument(name, getattr(self, name), "must be above 0")
        if not (math.isfinite(self.rate) and self.rate >= 0):
            raise InvalidArgument("rate", self.rate, "must be a finite number of at least 0")
        if not 0 <= self.spread < 10:
            raise InvalidArgument("spread", self.spread, "must lie in [0, 10)")


def phases(parts: Sequence[Phase], seed: int) -> Iterator[Arrival]:
    """The parts one after the other; gaps are gamma with CV 1/sqrt(burstiness)."""
    random = np.random.default_rng(seed)
    begin_s = 0.0
    for part in parts:
        yield from _phase(part, begin_s, random)
        begin_s += part.seconds


def _phase(part: Phase, begin_s: float, random: np.random.Generator) -> Iterator[Arrival]:
    end_s, now_s = begin_s + part.seconds, begin_s
    if part.rate <= 0:
        return
    while True:
        gaps = random.gamma(part.burstiness, 1 / (part.rate * part.burstiness), BATCH).cumsum() + now_s
        prompts = lengths(part.isl, part.spread, BATCH, random)
        outputs = lengths(part.osl, part.spread, BATCH, random)
        for at_s, prompt, output in zip(gaps.tolist(), prompts, outputs, strict=True):
            if at_s >= end_s:
                return
            yield Arrival(at_s, prompt, output)
        now_s = float(gaps[-1])


def lengths(mean: float, spread: float, count: int, random: np.random.Generator) -> list[int]:
    """``count`` log-normal lengths of at least 1 with this mean and coefficient of variation."""
    if spread == 0:
        return [max(1, round(mean))] * count
    variance = math.log1p(spread * spread)
    drawn = random.lognormal(math.log(mean) - variance / 2, math.sqrt(variance), count)
    rounded: list[int] = np.maximum(1, np.rint(drawn)).astype(int).tolist()
    return rounded


def sampled(
    rows: Sequence[tuple[int, int]], rate: float, count: int, seed: int, burstiness: float = 1.0
) -> Iterator[Arrival]:
    """``count`` requests with lengths drawn from ``rows`` (prompt, output), at ``rate``."""
    random = np.random.default_rng(seed)
    at_s = random.gamma(burstiness, 1 / (rate * burstiness), count).cumsum().tolist()
    chosen = random.integers(0, len(rows), count).tolist()
    for when_s, index in zip(at_s, chosen, strict=True):
        yield Arrival(when_s, *rows[index])


def varying(
    rate_at: Callable[[float], float], most: float, seconds: float, isl: float, osl: float, seed: int
) -> Iterator[Arrival]:
    """A Poisson process whose rate is ``rate_at(t)`` <= ``most``, by thinning."""
    random = np.random.default_rng(seed)
    for one in _phase(Phase(seconds, most, isl, osl), 0.0, random):
        if random.random() * most <= rate_at(one.at_s):
            yield one


def merged(streams: Sequence[Iterator[Arrival]]) -> Iterator[Arrival]:
    """Several streams in order of time."""
    yield from heapq.merge(*streams, key=lambda one: one.at_s)
