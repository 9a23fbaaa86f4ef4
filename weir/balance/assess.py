"""How the pools stand: what is asked, what they carry, which roles would carry it best, how long the stock lasts.

Pure functions of one observation; ``decide`` adds memory and patience.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from weir.balance.decision import BalanceLimits
from weir.balance.observe import Observation, Speed, WorkerFacts
from weir.balance.rideout import max_stock, stranded_flow, survivable_shortfall, time_to_end_s
from weir.balance.sizing import Roles, Sizing, fabric_of, size
from weir.lifecycle import Role

STILL = 0.1
"""A flow that differs by less than this share from the other is standing still."""
DEFAULT_OSL = 64.0
"""Output tokens assumed until a request has finished."""


@dataclass(frozen=True, slots=True)
class Stock:
    """Finished KV between the pools, bytes and bytes/s. ``end_s``: until it is empty or full at this pace.

    ``safety``: what to hold while prefill has spare time, within the TTFT slack.
    """

    delta: float = 0.0
    held: float = 0.0
    capacity: float = 0.0
    end_s: float = math.inf
    stranded: float = 0.0
    safety: float = 0.0


@dataclass(frozen=True, slots=True)
class Assessment:
    """Rates in requests/s. ``best`` are the roles that the same workers should have, ``why`` in words.

    ``used`` is demand over capacity; ``queued_s`` the time that the prompts waiting for prefill take; ``crowded`` the
    sequences that wait for decode over what decode can hold.
    """

    demand: float
    now: Roles
    sizing: Sizing
    capacity: float
    best: Roles
    best_capacity: float
    why: str
    queued_s: float
    crowded: float
    stock: Stock
    survivable: float
    tau_s: float

    @property
    def used(self) -> float:
        """Demand over capacity."""
        return self.demand / self.capacity if self.capacity > 0 else math.inf

    @property
    def gain(self) -> float:
        """By what share ``best`` carries more than the present roles."""
        return self.best_capacity / self.capacity - 1 if self.capacity > 0 else math.inf

    @property
    def prefill_used(self) -> float:
        """Share of the prefill workers' time that the demand takes."""
        able = self.now.prefill + self.now.mixed
        return self.demand * self.sizing.work.prefill_s / able if able else math.inf

    @property
    def decode_used(self) -> float:
        """Share of the decode workers' time that the demand takes."""
        able = self.now.decode + self.now.mixed
        return self.demand * self.sizing.work.decode_s / able if able else math.inf


def roles_of(workers: Sequence[WorkerFacts]) -> Roles:
    """How many there are of each role."""
    counts = {role: sum(worker.role is role for worker in workers) for role in Role}
    return Roles(counts[Role.PREFILL], counts[Role.DECODE], counts[Role.MIXED])


def ready_workers(seen: Observation, now_s: float, stale_s: float) -> list[WorkerFacts]:
    """Workers that take work and were heard of lately, by id."""
    alive = (w for w in seen.workers if w.heard_s is not None and now_s - w.heard_s <= stale_s and not w.draining)
    return sorted(alive, key=lambda worker: worker.worker_id)


def demand_of(seen: Observation, limits: BalanceLimits) -> float:
    """Requests/s to serve: what came, refused ones too, or a credible forecast if that is more."""
    asked = seen.traffic.rate_per_s + seen.traffic.refused_per_s
    if seen.forecast is None or seen.forecast.error > limits.forecast_error:
        return asked
    return max(asked, seen.forecast.value)


def assess(seen: Observation, speed: Speed, ready: Sequence[WorkerFacts], limits: BalanceLimits) -> Assessment:
    """See Assessment. Needs traffic and at least one ready worker."""
    traffic = seen.traffic
    uncached = traffic.uncached.mean if traffic.uncached.count else traffic.isl.mean
    osl, osl_high = (traffic.osl.mean, traffic.osl.p90) if traffic.osl.count else (DEFAULT_OSL, DEFAULT_OSL)
    sizing = size(speed, limits.slo, isl=traffic.isl.mean, uncached=uncached, osl=max(osl, 1.0), osl_high=osl_high)
    now = roles_of(ready)
    best, why = best_roles(sizing, now, speed, seen, limits)
    tau_s = seen.flip_s or limits.assumed_flip_s
    slack_s = _slack_s(sizing, uncached, limits)
    return Assessment(
        demand=demand_of(seen, limits),
        now=now,
        sizing=sizing,
        capacity=sizing.capacity(now),
        best=best,
        best_capacity=sizing.capacity(best),
        why=why,
        queued_s=_queued_s(ready, sizing),
        crowded=_crowded(ready, sizing),
        stock=_stock(seen, ready, speed, tau_s, slack_s),
        survivable=survivable_shortfall(ttft_slack_s=min(slack_s, 1e9), tau_s=tau_s),
        tau_s=tau_s,
    )


def best_roles(sizing: Sizing, now: Roles, speed: Speed, seen: Observation, limits: BalanceLimits) -> tuple[Roles, str]:
    """The roles that as many workers should have, and why; the present kind is kept within the band."""
    workers = now.total
    all_mixed = Roles(mixed=workers)
    if workers < 2:
        return (all_mixed, "one worker can only be mixed") if limits.mixed or not now.total else (now, "one worker")
    split = sizing.best_split(workers)
    roles = Roles(split.prefill, split.decode)
    words = f"balanced split of {workers} is {roles}, phi {sizing.work.prefill_share:.3f}, loss {split.loss:.1%}"
    if not limits.mixed:
        return roles, words
    fabric = fabric_of(sizing, roles, speed, seen.links)
    if fabric is not None and not fabric.holds:
        return all_mixed, f"{fabric.binding} carries {fabric.limit:.3g} B/s of the {fabric.flow:.3g} B/s of {roles}"
    is_mixed = not (now.prefill or now.decode)
    if split.loss > limits.max_loss * (1 if is_mixed else 1 + limits.band):
        return all_mixed, f"{words}, above the limit of {limits.max_loss:.0%}"
    gain = sizing.split_gain(workers)
    needed = limits.band if is_mixed else -limits.band / (1 + limits.band)
    if gain < needed:
        return all_mixed, f"{words}, which carries {gain:+.1%} against mixed: it does not pay"
    return roles, f"{words}, which carries {gain:+.1%} against mixed"


def _queued_s(ready: Sequence[WorkerFacts], sizing: Sizing) -> float:
    able = [worker for worker in ready if worker.role.prefills]
    tokens = sum(worker.pending_prefill_tokens for worker in able)
    return tokens / (sizing.prefill_tokens_per_s * len(able)) if able else 0.0


def _crowded(ready: Sequence[WorkerFacts], sizing: Sizing) -> float:
    able = [worker for worker in ready if worker.role is Role.DECODE]
    return sum(worker.waiting for worker in able) / (sizing.batch * len(able)) if able else 0.0


def _slack_s(sizing: Sizing, uncached: float, limits: BalanceLimits) -> float:
    """What the TTFT leaves after one prefill."""
    return max(0.0, limits.slo.ttft_s - limits.slo.overhead_s - uncached / sizing.prefill_tokens_per_s)


def _stock(seen: Observation, ready: Sequence[WorkerFacts], speed: Speed, tau_s: float, slack_s: float) -> Stock:
    able = [worker for worker in ready if worker.role.prefills]
    held = math.fsum(worker.stock_bytes for worker in able)
    capacity = held + math.fsum(worker.headroom_bytes for worker in able)
    produced = seen.traffic.produced_tokens_per_s * speed.bytes_per_token
    admitted = seen.traffic.admitted_tokens_per_s * speed.bytes_per_token
    delta = produced - admitted
    if abs(delta) <= STILL * max(produced, admitted):
        delta = 0.0
    return Stock(
        delta=delta,
        held=held,
        capacity=capacity,
        end_s=time_to_end_s(delta=delta, stock=held, capacity=capacity),
        stranded=stranded_flow(delta=delta, stock=held, capacity=capacity, tau_s=tau_s),
        safety=min(capacity, max_stock(admitted_per_s=admitted, ttft_slack_s=min(slack_s, 1e9))),
    )
