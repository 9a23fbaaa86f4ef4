"""How long a worker takes: times in seconds, sizes in tokens.

    prefill(chunks)      = a + b * sum(new) + c * sum(new * (past + new / 2))     causal attention to what came before
    step(batch, context) = a + b * batch + c * context                            one line for small batches, one more

A line is enough for every published model at hand, and makes decode analytic: for a fixed batch a step grows by the
same amount each time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from weir.balance.observe import Speed
from weir.balance.profile import Fit, Profile
from weir.errors import InvalidArgument

Chunk = tuple[int, int]
"""New tokens, and tokens before them whose KV is there."""


@dataclass(frozen=True, slots=True)
class StepLine:
    """``base + per_sequence * batch + per_token * context``."""

    base: float
    per_sequence: float
    per_token: float


@dataclass(frozen=True, slots=True)
class WorkerModel:
    """One worker's speeds and bounds; 0 as a bound means none.

    ``large`` holds from a batch of ``large_from`` on. ``max_step_tokens`` bounds the context tokens of one decode
    step, ``batch_tokens`` the prompt tokens of one prefill batch and the tokens of a mixed step. ``read_latency_s`` and
    ``read_bytes_per_s`` are the KV link, ``bytes_per_token`` what a token weighs on it. ``pads``: prompts of one batch
    are computed as if all were as long as the longest.
    """

    name: str
    prefill: tuple[float, float, float]
    small: StepLine
    large: StepLine
    large_from: int = 1 << 30
    max_batch: int = 256
    max_step_tokens: int = 0
    batch_tokens: int = 2048
    max_prefill_batch: int = 128
    kv_tokens: int = 0
    bytes_per_token: float = 0.0
    read_latency_s: float = 0.0
    read_bytes_per_s: float = math.inf
    pads: bool = False

    def __post_init__(self) -> None:
        numbers = (*self.prefill, self.small.base, self.small.per_sequence, self.small.per_token, self.large.base)
        if not all(math.isfinite(value) for value in numbers):
            raise InvalidArgument("model", self.name, "all coefficients must be finite")
        if self.prefill_s([(1, 0)]) <= 0 or self.step_s(1, 1) <= 0:
            raise InvalidArgument("model", self.name, "a prefill and a step must take time")

    def prefill_s(self, chunks: Sequence[Chunk]) -> float:
        """Time of one batch of prefill chunks."""
        a, b, c = self.prefill
        if self.pads:
            longest = max(new for new, _ in chunks)
            chunks = [(longest, past) for _, past in chunks]
        tokens = 0
        area = 0.0
        for new, past in chunks:
            tokens += new
            area += new * (past + new / 2)
        return a + b * tokens + c * area

    def line(self, batch: int) -> tuple[float, float]:
        """A step of ``batch`` sequences takes ``base + slope * context``: (base, slope)."""
        line = self.small if batch < self.large_from else self.large
        return line.base + line.per_sequence * batch, line.per_token

    def step_s(self, batch: int, context: float) -> float:
        """Time of one decode step of ``batch`` sequences with ``context`` tokens in all."""
        base, slope = self.line(batch)
        return base + slope * context

    def mixed_s(self, batch: int, context: float, chunks: Sequence[Chunk]) -> float:
        """A step that decodes and prefills: the weights are read once, so the smaller constant is not paid."""
        line = self.small if batch < self.large_from else self.large
        return self.prefill_s(chunks) + self.step_s(batch, context) - min(self.prefill[0], line.base)

    def read_s(self, num_bytes: float) -> float:
        """Time to read KV from a peer."""
        return self.read_latency_s + num_bytes / self.read_bytes_per_s if num_bytes > 0 else 0.0

    def speed(self, isl: float) -> Speed:
        """What a balance controller is told, at prompts of ``isl`` tokens."""
        tokens = max(1, round(isl))
        return Speed(
            prefill_tokens_per_s=tokens / self.prefill_s([(tokens, 0)]),
            step_base_s=self.small.base,
            step_per_sequence_s=self.small.per_sequence,
            step_per_token_s=self.small.per_token,
            max_batch=self.max_batch,
            kv_tokens=self.kv_tokens,
            bytes_per_token=self.bytes_per_token,
            source=self.name,
        )

    def profile(self) -> Profile:
        """What the worker publishes: small batches stand for all."""
        line = self.small
        per_byte = 0.0 if math.isinf(self.read_bytes_per_s) else 1 / self.read_bytes_per_s
        return Profile(
            fingerprint="simulated",
            device=self.name,
            threads=0,
            prefill=Fit(self.prefill, 1.0, 0.0, 0),
            step=Fit((line.base, line.per_sequence, line.per_token), 1.0, 0.0, 0),
            read=Fit((self.read_latency_s, per_byte), 1.0, 0.0, 0),
        )

    def with_link(self, latency_s: float, bytes_per_s: float, bytes_per_token: float) -> WorkerModel:
        """The same worker on another KV link."""
        return replace(self, read_latency_s=latency_s, read_bytes_per_s=bytes_per_s, bytes_per_token=bytes_per_token)


def from_profile(profile: Profile, *, bytes_per_token: float = 0.0, kv_tokens: int = 0) -> WorkerModel:
    """A worker as it was measured by ``weir profile``."""
    a, b, c = profile.step.coefficients
    line = StepLine(a, b, c)
    p_a, p_b, p_c = profile.prefill.coefficients
    latency, per_byte = profile.read.coefficients
    return WorkerModel(
        name=f"profile of {profile.device}, {profile.threads} threads",
        prefill=(p_a, p_b, p_c),
        small=line,
        large=line,
        max_batch=64,
        batch_tokens=512,
        kv_tokens=kv_tokens,
        bytes_per_token=bytes_per_token,
        read_latency_s=latency,
        read_bytes_per_s=1 / per_byte if per_byte > 0 else math.inf,
    )
