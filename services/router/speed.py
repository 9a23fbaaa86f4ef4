"""How fast one worker is: its published profile, corrected by what is seen of it. Pure.

Each of the three models (prefill, step, read) has a factor: observed over predicted time, smoothed over about
SMOOTHING_S of observations, so that a worker that becomes slow is seen as slow within seconds, and bounded. What
was seen is believed less as it grows old: without traffic a factor returns to that of the worker's peers, or nobody
would try the worker again. Times are in milliseconds here, moments in seconds on the router's clock.
"""

from __future__ import annotations

import math

from weir.balance.profile import Fit, Profile

SMOOTHING_S = 1.0
LEAST_WEIGHT = 0.25
"""Weight of an observation that follows at once on another."""
FIRST_SEEN = 3
"""So many first observations count in full."""
MAX_STEP = math.log(4.0)
"""One observation changes a factor by no more than this: a worker that stood still once is not slow for ever."""
FORGET_S = 5.0
MIN_FACTOR, MAX_FACTOR = 1 / 16, 64.0
TYPICAL_TOKENS = 256.0
MAX_PAIRS = 256
"""Source workers for which reads are followed apart."""
DEFAULT_PROFILE = Profile(
    fingerprint="",
    device="",
    threads=0,
    prefill=Fit((2e-3, 1e-4, 0.0), 0.0, 0.0, 0),
    step=Fit((4e-3, 4e-4, 0.0), 0.0, 0.0, 0),
    read=Fit((1e-3, 0.5e-9), 0.0, 0.0, 0),
)
"""For workers that publish none: a shape to be scaled by what is seen, never a reason to refuse a request."""


class Factor:
    """Observed over predicted time, smoothed in logarithms: twice too slow and twice too fast cancel out."""

    __slots__ = ("_log", "_seen_s", "_value", "observations", "prior")

    def __init__(self) -> None:
        self.prior = 0.0
        """Logarithm that is believed when nothing was seen for long: what is seen of the worker's peers."""
        self._log = 0.0
        self._value = 1.0
        """``exp(_log)``."""
        self._seen_s = -math.inf
        self.observations = 0

    def observe(self, ratio: float, now_s: float) -> None:
        """One observation; what is not a positive number is ignored."""
        if not 0.0 < ratio < math.inf:
            return
        value = math.log(min(max(ratio, MIN_FACTOR), MAX_FACTOR))
        age_s = max(0.0, now_s - self._seen_s)
        new = self.observations < FIRST_SEEN
        weight = 1.0 if new else max(LEAST_WEIGHT, 1.0 - math.exp(-age_s / SMOOTHING_S))
        step = weight * (value - self._log)
        self._log += min(max(step, -MAX_STEP), MAX_STEP)
        self._value = math.exp(self._log)
        self._seen_s = now_s
        self.observations += 1

    def at(self, now_s: float) -> float:
        """The factor to multiply a prediction by."""
        if self._log == self.prior:
            return self._value
        age_s = now_s - self._seen_s
        if age_s <= SMOOTHING_S:
            return self._value
        return math.exp(self.prior + (self._log - self.prior) * math.exp(-(age_s - SMOOTHING_S) / FORGET_S))

    def fresh(self, now_s: float) -> float | None:
        """The logarithm, if it was seen in the last FORGET_S."""
        return self._log if now_s - self._seen_s <= FORGET_S else None


class WorkerSpeed:
    """Predictions for one worker. ``known``: it published a profile, or enough of it was seen."""

    __slots__ = (
        "_pairs",
        "_prefill",
        "_prefill_coefficients",
        "_read",
        "_read_coefficients",
        "_step",
        "_step_coefficients",
        "per_token_ms",
        "published",
        "step_base_ms",
    )

    def __init__(self, profile: Profile | None) -> None:
        self._prefill, self._step, self._read = Factor(), Factor(), Factor()
        self._pairs: dict[str, Factor] = {}
        self.publish(profile)

    def publish(self, profile: Profile | None) -> None:
        """Take the profile that the worker publishes; what was seen of it stays, it is about the same machine."""
        self.published = profile is not None
        used = profile or DEFAULT_PROFILE
        self._prefill_coefficients = _ms(used.prefill.coefficients)
        self._step_coefficients = _ms(used.step.coefficients)
        self._read_coefficients = _ms(used.read.coefficients)
        self.per_token_ms = used.prefill_s(TYPICAL_TOKENS) * 1e3 / TYPICAL_TOKENS
        """Of a prompt of typical length, before correction: what one more token in the queue costs."""
        self.step_base_ms = used.step_s(1, 0) * 1e3

    @property
    def known(self) -> bool:
        """Whether predictions rest on something measured: only then may a request be refused for them."""
        return self.published or (self._prefill.observations >= 3 and self._step.observations >= 3)

    @property
    def factors(self) -> tuple[Factor, Factor, Factor]:
        """Of prefill, step and read."""
        return self._prefill, self._step, self._read

    # predictions

    def prefill_factor(self, now_s: float) -> float:
        """How much slower than published it prefills."""
        return self._prefill.at(now_s)

    def step_factor(self, now_s: float) -> float:
        """How much slower than published it decodes."""
        return self._step.at(now_s)

    def prefill_ms(self, tokens: float, cached: float, now_s: float) -> float:
        """Time to compute ``tokens`` behind ``cached`` ones."""
        if tokens <= 0:
            return 0.0
        a, b, c = self._prefill_coefficients
        return self._prefill.at(now_s) * (a + tokens * (b + c * (cached + tokens / 2)))

    def queue_ms(self, tokens: float, now_s: float) -> float:
        """Time to work off ``tokens`` of other prompts."""
        return self._prefill.at(now_s) * self.per_token_ms * tokens

    def step_ms(self, batch: float, context: float, now_s: float) -> float:
        """Time of a decode step of ``batch`` sequences with ``context`` tokens in all."""
        a, b, c = self._step_coefficients
        return self._step.at(now_s) * (a + b * batch + c * context)

    def read_ms(self, num_bytes: float, source: str, now_s: float) -> float:
        """Time to read ``num_bytes`` of KV from the worker ``source``."""
        if num_bytes <= 0:
            return 0.0
        a, b = self._read_coefficients
        factor = self._pairs.get(source, self._read) if self._pairs else self._read
        return factor.at(now_s) * (a + b * num_bytes)

    # observations

    def saw_prefill(self, took_ms: float, tokens: float, cached: float, now_s: float) -> None:
        """A prompt took this long from its start to its first token, alone or among others."""
        if tokens > 0:
            self._prefill.observe(took_ms / self._prefill_base(tokens, cached), now_s)

    def saw_rate(self, tokens_per_s: float, now_s: float) -> None:
        """It prefills so many tokens a second, as it says itself."""
        if tokens_per_s > 0:
            self._prefill.observe(1e3 / tokens_per_s / self.per_token_ms, now_s)

    def saw_step(self, took_ms: float, batch: float, context: float, now_s: float) -> None:
        """A decode step took this long."""
        if took_ms > 0 and batch > 0:
            self._step.observe(took_ms / self._step_base(batch, context), now_s)

    def saw_read(self, took_ms: float, num_bytes: float, source: str, now_s: float) -> None:
        """A read from ``source`` took this long."""
        if num_bytes <= 0 or took_ms <= 0:
            return
        a, b = self._read_coefficients
        ratio = took_ms / (a + b * num_bytes)
        self._read.observe(ratio, now_s)
        pair = self._pairs.pop(source, None) or Factor()
        pair.observe(ratio, now_s)
        self._pairs[source] = pair
        if len(self._pairs) > MAX_PAIRS:
            del self._pairs[next(iter(self._pairs))]

    def _prefill_base(self, tokens: float, cached: float) -> float:
        if tokens <= 0:
            return 0.0
        a, b, c = self._prefill_coefficients
        return a + tokens * (b + c * (cached + tokens / 2))

    def _step_base(self, batch: float, context: float) -> float:
        a, b, c = self._step_coefficients
        return a + b * batch + c * context


def _ms(coefficients: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(value * 1e3 for value in coefficients)
