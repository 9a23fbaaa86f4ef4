"""One run: workers, traffic, policy, controller and what goes wrong, and what came of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from weir.balance.decision import BalanceLimits, Decision
from weir.balance.sizing import Roles, Slo
from weir.balance.window import TrafficWindow
from weir.errors import InvalidArgument
from weir.lifecycle import Role
from weir.services.router.policy import LeastLoaded, Policy
from weir.simulate.balancing import Balancer, BalancerOptions, Facts
from weir.simulate.cluster import Cluster, ClusterOptions
from weir.simulate.events import EventQueue
from weir.simulate.metrics import Metrics, Summary
from weir.simulate.models import WorkerModel
from weir.simulate.traffic import Arrival
from weir.simulate.watch import NOBODY
from weir.simulate.worker import Worker

Fault = Callable[[Cluster], None]
DRAIN_S = 3600.0
"""Longest time after the last arrival: what is not done by then never will be."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """``seconds`` of ``arrivals``. ``decode_model`` None: as ``model``. ``limits`` None: no controller.

    ``faults`` are called at their moments; ``starts`` says whether a worker that was started gets ready. ``idle_s`` is
    how long the controller goes on after the last arrival.
    """

    roles: Roles
    model: WorkerModel
    arrivals: Iterator[Arrival]
    seconds: float
    slo: Slo = field(default_factory=Slo)
    decode_model: WorkerModel | None = None
    policy: Policy = field(default_factory=LeastLoaded)
    limits: BalanceLimits | None = None
    balancer: BalancerOptions = field(default_factory=BalancerOptions)
    window_s: float = 60.0
    cluster: ClusterOptions = field(default_factory=ClusterOptions)
    faults: Sequence[tuple[float, Fault]] = ()
    starts: Callable[[Role], bool] = lambda role: True
    idle_s: float = 0.0

    def __post_init__(self) -> None:
        if self.roles.total < 1:
            raise InvalidArgument("workers", self.roles.total, "at least one")
        if not self.roles.mixed and not (self.roles.prefill and self.roles.decode):
            raise InvalidArgument("workers", str(self.roles), "prefill and decode, or mixed ones")
        if self.decode_model is not None and self.limits is not None:
            raise InvalidArgument("decode_model", self.decode_model.name, "workers that change role are of one kind")


@dataclass(frozen=True, slots=True)
class Used:
    """What one worker did."""

    worker_id: str
    role: Role
    prefill_busy_s: float
    decode_busy_s: float
    preemptions: int


@dataclass(frozen=True, slots=True)
class Result:
    """``seconds`` of virtual time in all, ``events`` handled. ``roles`` as in ``Balancer``."""

    summary: Summary
    metrics: Metrics
    seconds: float
    events: int
    unfinished: int
    workers: tuple[Used, ...]
    decisions: tuple[Decision, ...]
    considered: int
    roles: tuple[tuple[float, int, int, int], ...]

    @property
    def changes(self) -> list[Decision]:
        """Decisions that changed roles or the number of workers."""
        return [one for one in self.decisions if one.action.lasting]


def run(scenario: Scenario, on_finished: Callable[[int], None] | None = None) -> Result:
    """Simulate it to the end. ``on_finished`` is told how many requests have finished."""
    events, metrics = EventQueue(), Metrics(scenario.slo)
    window = TrafficWindow(span_s=scenario.window_s)
    watcher = NOBODY if scenario.limits is None else Facts(window)
    cluster = Cluster(events, scenario.policy, metrics, scenario.cluster, watcher)
    cluster.on_finished = on_finished
    counts = ((Role.PREFILL, scenario.roles.prefill), (Role.DECODE, scenario.roles.decode))
    for role, count in (*counts, (Role.MIXED, scenario.roles.mixed)):
        for _ in range(count):
            model = scenario.decode_model if role is Role.DECODE and scenario.decode_model else scenario.model
            cluster.add(role, model)
    everybody = dict(cluster.workers)
    cluster.feed(scenario.arrivals)
    for when_s, fault in scenario.faults:
        events.at(when_s, fault, cluster)
    balancer = None
    if scenario.limits is not None:
        balancer = Balancer(cluster, window, scenario.model, scenario.limits, scenario.balancer, scenario.starts)
        balancer.start(scenario.seconds + scenario.idle_s)
    end_s = scenario.seconds + max(scenario.idle_s, DRAIN_S)
    _run_until_done(events, cluster, scenario.seconds + scenario.idle_s, end_s)
    everybody |= cluster.workers
    if not cluster.live:
        cluster.check_integrity()
    return Result(
        summary=metrics.summary(scenario.seconds),
        metrics=metrics,
        seconds=events.now_s,
        events=events.handled,
        unfinished=cluster.live,
        workers=tuple(map(_used, everybody.values())),
        decisions=tuple(balancer.decisions) if balancer else (),
        considered=balancer.considered if balancer else 0,
        roles=tuple(balancer.roles) if balancer else (),
    )


def _run_until_done(events: EventQueue, cluster: Cluster, least_s: float, most_s: float) -> None:
    """Until ``least_s``, then until no request is left, at most until ``most_s``."""
    if not math.isfinite(least_s):
        events.run()
        return
    events.run(least_s)
    while cluster.live and events.next_s <= most_s:
        events.run(events.next_s)


def _used(worker: Worker) -> Used:

    return Used(worker.worker_id, worker.role, worker.prefill_busy_s, worker.decode_busy_s, worker.preemptions)


def kill(worker_id: str) -> Fault:
    """The process of ``worker_id`` dies."""

    def fault(cluster: Cluster) -> None:
        worker = cluster.workers.get(worker_id)
        if worker is not None:
            cluster.remove(worker)

    return fault
