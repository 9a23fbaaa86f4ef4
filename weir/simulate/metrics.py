"""What came of the requests: times per request, gaps between tokens, goodput, use of the workers.

TTFT and TPOT are those of the benchmarks: TPOT = (e2e - ttft) / (n_out - 1). ``per_output`` divides by n_out instead,
as DistServe and Splitwise do.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from weir.balance.sizing import Slo
from weir.balance.window import Distribution

PLACES = 20.4959
"""Places of the histogram of gaps per factor e: 5 % each."""
GAP_FLOOR_S = 1e-4


@dataclass(frozen=True, slots=True)
class Summary:
    """A run, or a span of arrivals in it. Times in seconds, rates per second; ``attainment`` of all that arrived."""

    arrived: int
    finished: int
    rejected: int
    ttft_s: Distribution
    tpot_s: Distribution
    e2e_s: Distribution
    itl_p50_s: float
    itl_p99_s: float
    attainment: float
    goodput: float
    throughput: float


class Metrics:
    """Filled while a run goes on; ``slo`` is what counts as good."""

    def __init__(self, slo: Slo, *, per_output: bool = False) -> None:
        self.slo = slo
        self.arrived = 0
        self.rejected = 0
        self.retried = 0
        self.output_tokens = 0
        self.arrivals_s = array("d")
        self.ttfts_s = array("d")
        self.ends_s = array("d")
        self.tpots_s = array("d")
        self._per_output = per_output
        self._gaps: dict[int, int] = {}

    def gap(self, seconds: float, tokens: int) -> None:
        """``tokens`` came ``seconds`` after the ones before them. Kept to 5 %."""
        place = int(math.log(seconds / GAP_FLOOR_S) * PLACES) if seconds > GAP_FLOOR_S else 0
        self._gaps[place] = self._gaps.get(place, 0) + tokens

    def finished(self, arrival_s: float, first_s: float, end_s: float, output: int) -> None:
        """A request ended well."""
        count = output if self._per_output else output - 1
        self.arrivals_s.append(arrival_s)
        self.ttfts_s.append(first_s - arrival_s)
        self.ends_s.append(end_s)
        self.tpots_s.append((end_s - first_s) / count if count > 0 else 0.0)
        self.output_tokens += output

    def good(self, from_s: float = -math.inf, to_s: float = math.inf) -> int:
        """Requests that arrived in the span and met the SLO."""
        ttft, tpot = self.slo.ttft_s, self.slo.tpot_s
        rows = zip(self.arrivals_s, self.ttfts_s, self.tpots_s, strict=True)
        return sum(a <= ttft and b <= tpot and from_s <= at < to_s for at, a, b in rows)

    def gap_quantile(self, share: float) -> float:
        """A gap that ``share`` of the tokens did not exceed."""
        total, wanted = sum(self._gaps.values()), 0.0
        for place in sorted(self._gaps):
            wanted += self._gaps[place]
            if wanted >= share * total:
                return GAP_FLOOR_S * math.exp((place + 0.5) / PLACES)
        return 0.0

    def summary(self, seconds: float) -> Summary:
        """All of a run in which requests arrived for ``seconds``."""
        ends = list(self.ends_s)
        e2e = [end - at for end, at in zip(ends, self.arrivals_s, strict=True)]
        good = self.good()
        return Summary(
            arrived=self.arrived,
            finished=len(ends),
            rejected=self.rejected,
            ttft_s=Distribution.of(self.ttfts_s),
            tpot_s=Distribution.of([value for value in self.tpots_s if value > 0]),
            e2e_s=Distribution.of(e2e),
            itl_p50_s=self.gap_quantile(0.5),
            itl_p99_s=self.gap_quantile(0.99),
            attainment=good / self.arrived if self.arrived else 0.0,
            goodput=good / seconds if seconds > 0 else 0.0,
            throughput=len(ends) / seconds if seconds > 0 else 0.0,
        )

    def good_by_bucket(self, bucket_s: float, until_s: float) -> tuple[Sequence[float], Sequence[float]]:
        """Per bucket of arrival time: requests/s that finished at all, and that met the SLO."""
        count = max(1, math.ceil(until_s / bucket_s))
        done, good = [0.0] * count, [0.0] * count
        ttft, tpot = self.slo.ttft_s, self.slo.tpot_s
        for at, a, b in zip(self.arrivals_s, self.ttfts_s, self.tpots_s, strict=True):
            place = min(count - 1, int(at / bucket_s))
            done[place] += 1 / bucket_s
            good[place] += (a <= ttft and b <= tpot) / bucket_s
        return done, good
