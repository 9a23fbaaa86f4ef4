"""What a set of workers can carry within the SLO: split, mixed, and which of the two pays.

split   p/t_P and d/t_D requests/s, with the whole-worker loss; a mixed worker fills in on either side
mixed   every worker does both: no rounding, but a step waits for the prefill beside it, so the batch that meets the
        TPOT is smaller
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from weir.balance.capacity import Split, Work, positive, slo_prefill_tokens_per_s, split_loss, whole_worker_split
from weir.balance.fabric import FabricCheck, check_fabric
from weir.balance.observe import Links, Speed
from weir.errors import InvalidArgument

MIN_RATE_SHARE = 0.2
"""The TTFT takes at most the rest of a prefill worker's rate as reserve against queueing."""


@dataclass(frozen=True, slots=True)
class Slo:
    """What requests are to meet; infinite: no demand. ``overhead_s`` of the TTFT is no prefill."""

    ttft_s: float = math.inf
    tpot_s: float = math.inf
    overhead_s: float = 0.02

    def __post_init__(self) -> None:
        for name, value in (("ttft_s", self.ttft_s), ("tpot_s", self.tpot_s)):
            if not value > 0:
                raise InvalidArgument(name, value, "must be above 0")
        if not (math.isfinite(self.overhead_s) and 0 <= self.overhead_s < self.ttft_s):
            raise InvalidArgument("overhead_s", self.overhead_s, f"must lie in [0, ttft_s = {self.ttft_s:g})")


@dataclass(frozen=True, slots=True)
class Roles:
    """Numbers of workers."""

    prefill: int = 0
    decode: int = 0
    mixed: int = 0

    @property
    def total(self) -> int:
        """All."""
        return self.prefill + self.decode + self.mixed

    def __str__(self) -> str:
        parts = ((self.prefill, "P"), (self.decode, "D"), (self.mixed, "M"))
        return "+".join(f"{count}{letter}" for count, letter in parts if count) or "none"


@dataclass(frozen=True, slots=True)
class Sizing:
    """Work per request on each pool, and the mixed alternative, at this traffic.

    ``batch`` and ``step_s`` are the decode batch that meets the TPOT and its step; ``notes`` names SLOs that no number
    of workers can meet.
    """

    work: Work
    batch: int
    step_s: float
    prefill_tokens_per_s: float
    mixed_worker_rate: float
    notes: tuple[str, ...] = ()

    def capacity(self, roles: Roles) -> float:
        """Requests/s that ``roles`` carry within the SLO."""
        p, d, m = roles.prefill, roles.decode, roles.mixed
        if not p and not d:
            return m * self.mixed_worker_rate
        t_p, t_d = self.work.prefill_s, self.work.decode_s
        together = roles.total / (t_p + t_d)
        return min((p + m) / t_p, (d + m) / t_d, together)

    def best_split(self, workers: int) -> Split:
        """The integer split of ``workers`` >= 2 with the least loss."""
        share = min(max(self.work.prefill_share, 1e-9), 1 - 1e-9)
        return whole_worker_split(share, workers)

    def split_gain(self, workers: int) -> float:
        """By what share the best split carries more than as many mixed workers; negative when it carries less."""
        split = self.best_split(workers)
        return self.capacity(Roles(split.prefill, split.decode)) / (workers * self.mixed_worker_rate) - 1

    def loss(self, roles: Roles) -> float:
        """The share of R_max that a pure split loses."""
        return split_loss(self.work.prefill_share, roles.total, roles.prefill, roles.decode)

    def workers_for(self, rate: float, most: int, *, mixed: bool) -> int | None:
        """The fewest workers that carry ``rate``; None when ``most`` do not."""
        if mixed:
            needed = max(1, math.ceil(rate / self.mixed_worker_rate - 1e-9))
            return needed if needed <= most else None
        low = max(2, math.ceil(rate * (self.work.prefill_s + self.work.decode_s) - 1e-9))
        for workers in range(low, most + 1):
            split = self.best_split(workers)
            if self.capacity(Roles(split.prefill, split.decode)) >= rate * (1 - 1e-9):
                return workers
        return None


def size(speed: Speed, slo: Slo, *, isl: float, uncached: float, osl: float, osl_high: float | None = None) -> Sizing:
    """Sizing for requests of ``isl`` prompt tokens (``uncached`` to compute) and ``osl`` output tokens.

    ``osl_high`` (default ``osl``) is the length that memory is kept for. Raises InvalidArgument for sizes and speeds
    that are not positive.
    """
    positive("isl", isl)
    positive("osl", osl)
    notes: list[str] = []
    rate = _prefill_rate(speed, slo, max(uncached, 1.0), notes)
    context = isl + osl / 2
    roomy = _batch_in_memory(speed, isl + (osl if osl_high is None else max(osl, osl_high)))
    batch = _largest_batch(speed, slo.tpot_s, context, roomy)
    if speed.step_s(batch, batch * context) > slo.tpot_s:
        notes.append(f"TPOT {slo.tpot_s * 1e3:g} ms is below one step of {speed.step_s(1, context) * 1e3:.3g} ms")
    step_s = positive("step_s", speed.step_s(batch, batch * context))
    work = Work(max(uncached, 1.0) / rate, osl * step_s / batch)
    return Sizing(work, batch, step_s, rate, _mixed_rate(speed, slo, work.prefill_s, context, osl, roomy), tuple(notes))


def _prefill_rate(speed: Speed, slo: Slo, uncached: float, notes: list[str]) -> float:
    """r_P, less what keeps the queue within the TTFT."""
    full = positive("prefill_tokens_per_s", speed.prefill_tokens_per_s)
    if math.isinf(slo.ttft_s):
        return full
    if uncached / full >= slo.ttft_s - slo.overhead_s:
        notes.append(f"TTFT {slo.ttft_s * 1e3:g} ms is below one prefill of {uncached / full * 1e3:.3g} ms")
        return full
    reserved = slo_prefill_tokens_per_s(
        max_tokens_per_s=full, isl=uncached, ttft_s=slo.ttft_s, overhead_s=slo.overhead_s
    )
    return max(reserved, MIN_RATE_SHARE * full)


def _batch_in_memory(speed: Speed, tokens: float) -> int:
    room = int(speed.kv_tokens // tokens) if speed.kv_tokens else speed.max_batch
    return max(1, min(speed.max_batch, room))


def _largest_batch(speed: Speed, limit_s: float, context: float, most: int) -> int:
    """The largest batch up to ``most`` with a step within ``limit_s``; 1 when none is."""
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        if speed.step_s(middle, middle * context) <= limit_s:
            low = middle
        else:
            high = middle - 1
    return low


def _mixed_rate(speed: Speed, slo: Slo, prefill_s: float, context: float, osl: float, most: int) -> float:
    """Requests/s of one mixed worker: the batch whose step, stretched by the prefill beside it, meets the TPOT.

    At rate r a share r t_P of the time prefills, so a step takes step / (1 - r t_P) and the rate is
    1 / (t_P + OSL step / B). The stretched step grows with the batch, so the largest that fits is found by bisection; a
    batch of 1 that is too slow carries what leaves it its TPOT.
    """

    def rate_of(batch: int) -> float:
        return 1 / (prefill_s + osl * speed.step_s(batch, batch * context) / batch)

    def fits(batch: int) -> bool:
        prefilling = rate_of(batch) * prefill_s
        return speed.step_s(batch, batch * context) <= slo.tpot_s * (1 - prefilling)

    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    if fits(low):
        return rate_of(low)
    spare = 1 - speed.step_s(1, context) / slo.tpot_s
    return max(spare / prefill_s, MIN_RATE_SHARE * rate_of(1)) if spare > 0 else MIN_RATE_SHARE * rate_of(1)


def fabric_of(sizing: Sizing, roles: Roles, speed: Speed, links: Links) -> FabricCheck | None:
    """The fabric condition of a split; None when the links or the KV's size are not known."""
    if not (roles.prefill and roles.decode and links.prefill > 0 and links.decode > 0 and speed.bytes_per_token > 0):
        return None
    return check_fabric(
        prefill_workers=roles.prefill,
        prefill_tokens_per_s=sizing.prefill_tokens_per_s,
        bytes_per_token=speed.bytes_per_token,
        prefill_link=links.prefill,
        decode_workers=roles.decode,
        decode_link=links.decode,
        fabric=links.fabric,
    )
