"""What the balance controller is told: one snapshot of traffic, workers and links. Values only.

An observation may be wrong in every way that a broken sensor can be: ``faults`` names what cannot be acted on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from weir.balance.forecast import Forecast
from weir.balance.window import Traffic
from weir.lifecycle import Role


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """One worker as last heard of.

    ``heard_s`` is when its load was last reported, by the controller's clock; None when it never was. ``stock_bytes``
    is finished KV that waits there under leases, ``headroom_bytes`` what more its pool can hold.
    """

    worker_id: str
    role: Role
    epoch: int
    heard_s: float | None
    draining: bool = False
    running: int = 0
    waiting: int = 0
    pending_prefill_tokens: int = 0
    stock_bytes: float = 0.0
    headroom_bytes: float = 0.0
    incarnation: int = 0

    @property
    def load(self) -> int:
        """Sequences that it has."""
        return self.running + self.waiting


@dataclass(frozen=True, slots=True)
class Speed:
    """What one worker can do; the pools are of one kind, since workers change role.

    ``prefill_tokens_per_s`` at the present prompt length; ``step_base_s`` + ``step_per_sequence_s`` * batch +
    ``step_per_token_s`` * context tokens of the batch is a decode step. ``kv_tokens`` is the pool, 0 when unknown.
    ``source`` says in words where the figures are from.
    """

    prefill_tokens_per_s: float
    step_base_s: float
    step_per_sequence_s: float = 0.0
    step_per_token_s: float = 0.0
    max_batch: int = 64
    kv_tokens: int = 0
    bytes_per_token: float = 0.0
    source: str = ""

    def step_s(self, batch: float, context_tokens: float) -> float:
        """Time of one decode step."""
        return self.step_base_s + self.step_per_sequence_s * batch + self.step_per_token_s * context_tokens


@dataclass(frozen=True, slots=True)
class Links:
    """Measured bandwidths, bytes/s per worker and of the whole fabric. 0 per worker: not known, not checked."""

    prefill: float = 0.0
    decode: float = 0.0
    fabric: float = math.inf


@dataclass(frozen=True, slots=True)
class Observation:
    """Everything that a decision may rest on.

    ``speed`` None: not known yet. ``flip_s`` is the measured time of a role flip (tau), 0 when none was made.
    ``stale`` says why the view is old, empty when it is not.
    """

    workers: tuple[WorkerFacts, ...]
    traffic: Traffic
    forecast: Forecast | None = None
    speed: Speed | None = None
    links: Links = field(default_factory=Links)
    flip_s: float = 0.0
    stale: str = ""

    def faults(self) -> list[str]:
        """Why this must not be acted on, in words; empty when it may."""
        found = [self.stale] if self.stale else []
        found += [f"{name} is {value}" for name, value in self._numbers() if not math.isfinite(value) or value < 0]
        return found

    def _numbers(self) -> Iterator[tuple[str, float]]:
        traffic = self.traffic
        yield "arrival rate", traffic.rate_per_s
        for name, lengths in (("ISL", traffic.isl), ("OSL", traffic.osl), ("uncached tokens", traffic.uncached)):
            yield name, lengths.mean
            yield f"{name} p90", lengths.p90
        yield "KV produced", traffic.produced_tokens_per_s
        yield "KV admitted", traffic.admitted_tokens_per_s
        yield "flip time", self.flip_s
        if self.forecast is not None:
            yield "forecast", self.forecast.value
        if self.speed is not None:
            yield "prefill speed", self.speed.prefill_tokens_per_s
            yield "decode step", self.speed.step_s(1, 1)
        for worker in self.workers:
            yield f"stock of {worker.worker_id}", worker.stock_bytes
            yield f"headroom of {worker.worker_id}", worker.headroom_bytes
