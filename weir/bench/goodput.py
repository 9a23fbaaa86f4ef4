"""Service-level objectives of a benchmark: ``ttft:200 tpot:50 e2el:2000``, in milliseconds. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from weir.bench.records import RequestRecord
from weir.errors import InvalidArgument

METRICS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True)
class Slo:
    """Upper bounds in milliseconds; infinite where none was given."""

    ttft_ms: float = math.inf
    tpot_ms: float = math.inf
    e2el_ms: float = math.inf

    def met_by(self, record: RequestRecord) -> bool:
        """Whether the request completed within every bound (a bound itself is within)."""
        return (
            record.ok
            and record.ttft_s * 1e3 <= self.ttft_ms
            and record.tpot_s * 1e3 <= self.tpot_ms
            and record.e2e_s * 1e3 <= self.e2el_ms
        )


def parse_goodput(words: Iterable[str]) -> Slo | None:
    """The objectives of ``name:milliseconds`` words, separated by blanks or commas; None when there are none.

    Raises InvalidArgument for an unknown name, a name given twice, or a bound that is not a positive number.
    """
    bounds: dict[str, float] = {}
    for word in " ".join(words).replace(",", " ").split():
        name, _, value = word.partition(":")
        if name not in METRICS:
            raise InvalidArgument("--goodput", word, f"must be one of {', '.join(METRICS)}, as name:milliseconds")
        if name in bounds:
            raise InvalidArgument("--goodput", word, f"{name} was given twice")
        bounds[name] = _milliseconds(word, value)
    return Slo(**{f"{name}_ms": bound for name, bound in bounds.items()}) if bounds else None


def _milliseconds(word: str, value: str) -> float:
    try:
        bound = float(value)
    except ValueError:
        bound = math.nan
    if not bound > 0:
        raise InvalidArgument("--goodput", word, "the bound must be a number of milliseconds > 0")
    return bound
