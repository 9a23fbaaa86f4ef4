"""What the traffic was in the last minutes: distributions of arrivals, prompt and output lengths, prefix hits.

Facts come with the time at which they are taken in; everything older than the span is forgotten, and so is the oldest
of more than ``MAX_SAMPLES`` facts of a kind. Facts that are no sizes of a request (NaN, negative) are counted and
dropped.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from weir.balance.capacity import positive
from weir.errors import InvalidArgument

MAX_SAMPLES = 4096
MAX_BUCKETS = 4096
LATEST_SHARE = 8
"""The last eighth of the window is compared with the rest of it."""
LEAST_TOLD = 16
"""Samples on either side without which nothing is told."""
CHANGE_SIGMAS = 6.0
LEAST_CHANGE = math.log(1.5)
"""Typical lengths that differ by less are no other traffic."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """A set of samples by count, mean and nearest-rank quantiles; all 0 when there is none."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0

    @classmethod
    def of(cls, samples: Sequence[float]) -> Distribution:
        """The distribution of ``samples``, in any order."""
        return cls.of_ordered(sorted(samples))

    @classmethod
    def of_ordered(cls, ordered: Sequence[float]) -> Distribution:
        """The distribution of samples that ascend."""
        if not ordered:
            return cls()
        last = len(ordered) - 1

        def rank(share: float) -> float:
            return ordered[min(last, math.ceil(share * len(ordered)) - 1)]

        return cls(len(ordered), math.fsum(ordered) / len(ordered), rank(0.5), rank(0.9), rank(0.99))


@dataclass(frozen=True, slots=True)
class Traffic:
    """The window now. Rates are per second over ``span_s``; tokens are per request.

    ``uncached`` are prompt tokens that had to be computed, ``hit_ratio`` the share that had not. ``produced`` and
    ``admitted`` are prompt tokens/s whose KV was finished by prefill, and taken over by decode.
    """

    span_s: float
    rate_per_s: float
    arrivals: Distribution
    isl: Distribution
    uncached: Distribution
    osl: Distribution
    hit_ratio: float
    produced_tokens_per_s: float
    admitted_tokens_per_s: float
    ttft_s: Distribution
    tpot_s: Distribution
    refused_per_s: float
    changed_s: float = math.inf
    """Since the lengths of prompts or answers were found to be others than before; they are of what came since."""

    @property
    def empty(self) -> bool:
        """Whether nothing arrived in the window."""
        return self.rate_per_s <= 0.0


class _Moments:
    """Count, mean and variance of logarithms, of samples that come and go."""

    __slots__ = ("count", "squares", "total")

    def __init__(self) -> None:
        self.count, self.total, self.squares = 0, 0.0, 0.0

    def add(self, value: float, sign: int = 1) -> None:
        log = math.log1p(value)
        self.count += sign
        self.total += sign * log
        self.squares += sign * log * log

    @property
    def mean(self) -> float:
        return self.total / self.count

    @property
    def variance_of_mean(self) -> float:
        return max(self.squares / self.count - self.mean * self.mean, 0.0) / (self.count - 1)


class _Samples:
    """(time, value) of one kind, bounded in age and number; in the order of values as well, so that nobody sorts.

    When the latest differ from the others by more than chance can do, the others are forgotten: they are of traffic
    that is over. The test is Welch's, on logarithms, since lengths have long tails. Nothing is told before a whole span
    of the same traffic was seen: when traffic begins, short answers end first, and look like a change to long ones.
    """

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._latest_s = span_s / LATEST_SHARE
        self._old: deque[tuple[float, float]] = deque()
        self._latest: deque[tuple[float, float]] = deque()
        self._old_moments, self._latest_moments = _Moments(), _Moments()
        self._ordered: list[float] = []
        self._since_s = math.inf
        self.changed_s = -math.inf
        """When the others were forgotten last."""

    def add(self, now_s: float, value: float) -> None:
        self._age(now_s)
        if not self._ordered:
            self._since_s = now_s
        if len(self._ordered) >= MAX_SAMPLES:
            self._drop_oldest()
        self._latest.append((now_s, value))
        self._latest_moments.add(value)
        insort(self._ordered, value)

    def ordered(self, now_s: float) -> Sequence[float]:
        """The values, from the smallest to the largest; to be read only."""
        self._age(now_s)
        from_s = now_s - self._span_s
        while self._ordered and (self._old or self._latest)[0][0] <= from_s:
            self._drop_oldest()
        if now_s >= self._since_s + self._span_s and self._have_changed():
            self.changed_s = self._since_s = now_s
        # Some of the latest were of the old traffic as well: they go as they age.
        while self._old and now_s < self.changed_s + self._latest_s:
            self._drop_oldest()
        return self._ordered

    def _age(self, now_s: float) -> None:
        latest, until_s = self._latest, now_s - self._latest_s
        while latest and latest[0][0] <= until_s:
            item = latest.popleft()
            self._latest_moments.add(item[1], -1)
            self._old.append(item)
            self._old_moments.add(item[1])

    def _drop_oldest(self) -> None:
        old = self._old
        _, value = (old or self._latest).popleft()
        (self._old_moments if old or self._old_moments.count else self._latest_moments).add(value, -1)
        del self._ordered[bisect_left(self._ordered, value)]

    def _have_changed(self) -> bool:
        old, latest = self._old_moments, self._latest_moments
        if old.count < LEAST_TOLD or latest.count < LEAST_TOLD:
            return False
        apart = abs(latest.mean - old.mean)
        return apart > LEAST_CHANGE and apart > CHANGE_SIGMAS * math.sqrt(
            old.variance_of_mean + latest.variance_of_mean
        )


class _Buckets:
    """Sums by bucket of time: exact totals of any number of facts, for rates and for forecasts."""

    def __init__(self, span_s: float, bucket_s: float) -> None:
        self._bucket_s = bucket_s
        self._items: deque[tuple[int, float]] = deque(maxlen=math.ceil(span_s / bucket_s) + 1)

    def add(self, now_s: float, value: float) -> None:
        index = math.floor(now_s / self._bucket_s)
        if self._items and self._items[-1][0] >= index:
            last, total = self._items[-1]
            self._items[-1] = (last, total + value)
        else:
            self._items.append((index, value))

    def whole(self, now_s: float, count: int) -> list[float]:
        """The last ``count`` whole buckets before the running one, oldest first; empty ones are 0."""
        end = math.floor(now_s / self._bucket_s)
        found = dict(self._items)
        return [found.get(index, 0.0) for index in range(end - count, end)]

    def per_second(self, now_s: float, count: int) -> float:
        """The mean over the last ``count`` whole buckets; over the running one when there is none yet."""
        if count:
            return math.fsum(self.whole(now_s, count)) / (count * self._bucket_s)
        running = math.floor(now_s / self._bucket_s)
        return math.fsum(value for index, value in self._items if index == running) / self._bucket_s


class TrafficWindow:
    """``span_s`` seconds of traffic in buckets of ``bucket_s``. Not thread-safe."""

    def __init__(self, span_s: float = 60.0, bucket_s: float = 1.0) -> None:
        positive("bucket_s", bucket_s)
        if not bucket_s <= positive("span_s", span_s) <= bucket_s * MAX_BUCKETS:
            raise InvalidArgument("span_s", span_s, f"must lie in [{bucket_s:g}, {bucket_s * MAX_BUCKETS:g}]")
        self.span_s = span_s
        self.bucket_s = bucket_s
        self.dropped = 0
        """Facts that were no sizes of a request."""
        self._started_s: float | None = None
        self._arrivals = _Buckets(span_s, bucket_s)
        self._refused = _Buckets(span_s, bucket_s)
        self._produced = _Buckets(span_s, bucket_s)
        self._admitted = _Buckets(span_s, bucket_s)
        self._isl, self._uncached, self._osl = _Samples(span_s), _Samples(span_s), _Samples(span_s)
        self._prefilled, self._ttft, self._tpot = _Samples(span_s), _Samples(span_s), _Samples(span_s)

    def start(self, now_s: float) -> None:
        """Facts are taken in from now on. Without it the first fact starts the window."""
        if self._started_s is None:
            self._started_s = now_s

    def arrived(self, now_s: float, prompt_tokens: float) -> None:
        """A request was admitted."""
        if self._sound(now_s, prompt_tokens):
            self._arrivals.add(now_s, 1.0)
            self._isl.add(now_s, prompt_tokens)

    def refused(self, now_s: float) -> None:
        """A request was rejected."""
        if self._sound(now_s):
            self._refused.add(now_s, 1.0)

    def prefilled(self, now_s: float, prompt_tokens: float, cached_tokens: float) -> None:
        """A prompt's KV is finished; ``cached_tokens`` of it were in a cache."""
        if self._sound(now_s, prompt_tokens, cached_tokens):
            self._produced.add(now_s, prompt_tokens)
            self._prefilled.add(now_s, prompt_tokens)
            self._uncached.add(now_s, max(0.0, prompt_tokens - cached_tokens))

    def decode_began(self, now_s: float, prompt_tokens: float) -> None:
        """Decode has taken the prompt's KV over."""
        if self._sound(now_s, prompt_tokens):
            self._admitted.add(now_s, prompt_tokens)

    def finished(self, now_s: float, output_tokens: float, ttft_s: float, tpot_s: float) -> None:
        """A request ended well; times of 0 are not known."""
        if self._sound(now_s, output_tokens, ttft_s, tpot_s):
            self._osl.add(now_s, output_tokens)
            for samples, value in ((self._ttft, ttft_s), (self._tpot, tpot_s)):
                if value > 0:
                    samples.add(now_s, value)

    def arrivals_by_bucket(self, now_s: float, count: int) -> list[float]:
        """Arrivals per second in each of the last ``count`` whole buckets, oldest first."""
        return [total / self.bucket_s for total in self._arrivals.whole(now_s, count)]

    def snapshot(self, now_s: float) -> Traffic:
        """The window now. A window that is not full yet is measured over the time that it has."""
        started_s = now_s if self._started_s is None else self._started_s
        span_s = min(self.span_s, max(now_s - started_s, self.bucket_s))
        whole = math.floor(min(self.span_s, max(0.0, now_s - started_s)) / self.bucket_s)

        def lengths(samples: _Samples) -> Distribution:
            return Distribution.of_ordered(samples.ordered(now_s))

        return Traffic(
            span_s=span_s,
            rate_per_s=self._arrivals.per_second(now_s, whole),
            arrivals=Distribution.of(self.arrivals_by_bucket(now_s, whole)),
            isl=lengths(self._isl),
            uncached=lengths(self._uncached),
            osl=lengths(self._osl),
            hit_ratio=self._hit_ratio(now_s),
            produced_tokens_per_s=self._produced.per_second(now_s, whole),
            admitted_tokens_per_s=self._admitted.per_second(now_s, whole),
            ttft_s=lengths(self._ttft),
            tpot_s=lengths(self._tpot),
            refused_per_s=self._refused.per_second(now_s, whole),
            changed_s=now_s - max(self._isl.changed_s, self._osl.changed_s),
        )

    def _hit_ratio(self, now_s: float) -> float:
        computed, prompts = math.fsum(self._uncached.ordered(now_s)), math.fsum(self._prefilled.ordered(now_s))
        return 1.0 - computed / prompts if prompts > 0 else 0.0

    def _sound(self, now_s: float, *values: float) -> bool:
        if math.isfinite(now_s) and all(math.isfinite(value) and value >= 0 for value in values):
            self.start(now_s)
            return True
        self.dropped += 1
        return False
