"""The production ``BalanceController`` on a simulated cluster: its window, its forecasts, its clock, and an actuator.

Flip     draining: queued prompts go back to the router; decodes finish, after ``drain_s`` the rest is handed over with
         its KV; after ``flip_s`` more the worker is there in its new role, one epoch on
Start    a new worker is ready after ``start_s``, or never
Stop     as a flip drains; the worker leaves when its last KV has been read
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from weir.balance.decide import BalanceController
from weir.balance.decision import Action, BalanceLimits, Decision, Flip
from weir.balance.forecast import Constant, ForecastPanel, HoltWinters
from weir.balance.observe import Observation, WorkerFacts
from weir.balance.window import TrafficWindow
from weir.lifecycle import Role
from weir.services.router.advice import Advice
from weir.simulate.cluster import Cluster
from weir.simulate.models import WorkerModel
from weir.simulate.worker import Worker

POLL_S = 0.05
UNBOUNDED_BYTES = 1e15


def advice_of(decision: Decision) -> Advice:
    """A decision as routers heed it."""
    standing = decision.action in (Action.LOCAL_PREFILL, Action.BACK_PRESSURE)
    return Advice(
        publisher="controller",
        incarnation=1,
        sequence=decision.number,
        number=decision.number,
        lasts_s=decision.expires_s - decision.at_s if standing else 0.0,
        epochs=decision.epochs,
        local_share=decision.local_share,
        admit_per_s=decision.admit_per_s or math.inf,
    )


class Facts:
    """Watcher that feeds a traffic window."""

    def __init__(self, window: TrafficWindow) -> None:
        self.window = window
        self.arrived = window.arrived
        self.refused = window.refused
        self.prefilled = window.prefilled
        self.decode_began = window.decode_began

    def finished(self, now_s: float, output_tokens: float, ttft_s: float, decode_s: float) -> None:
        """See Watcher."""
        tpot_s = decode_s / (output_tokens - 1) if output_tokens > 1 else 0.0
        self.window.finished(now_s, output_tokens, ttft_s, tpot_s)


@dataclass(frozen=True, slots=True)
class BalancerOptions:
    """``interval_s`` between decisions; the rest as in the module."""

    interval_s: float = 1.0
    flip_s: float = 1.0
    drain_s: float = 2.0
    start_s: float = 30.0
    horizon: int = 10


class Balancer:
    """``start`` once; acts until ``until_s`` of virtual time. ``starts(role)``: whether a started worker gets ready."""

    def __init__(
        self,
        cluster: Cluster,
        window: TrafficWindow,
        model: WorkerModel,
        limits: BalanceLimits,
        options: BalancerOptions | None = None,
        starts: Callable[[Role], bool] = lambda role: True,
    ) -> None:
        self.controller = BalanceController(limits)
        self.decisions: list[Decision] = []
        """Those that did or cancelled something."""
        self.considered = 0
        self.roles: list[tuple[float, int, int, int]] = []
        """(moment, prefill, decode, mixed) at each change."""
        self._cluster = cluster
        self._events = cluster.events
        self._window = window
        self._model = model
        self._options = options or BalancerOptions()
        self._panel = ForecastPanel([Constant(int(window.span_s)), HoltWinters()], horizon=self._options.horizon)
        self._starts = starts
        self._cancelled: set[int] = set()
        self._flip_s = 0.0
        self._fed_s = 0
        self._until_s = math.inf

    def start(self, until_s: float) -> None:
        """Begin to decide, every interval."""
        self._until_s = until_s
        self._window.start(self._events.now_s)
        self._note_roles()
        self._events.at(self._events.now_s + self._options.interval_s, self._tick, None)

    @property
    def changes(self) -> list[Decision]:
        """Decisions that changed roles or the number of workers."""
        return [one for one in self.decisions if one.action.lasting]

    def observe(self) -> Observation:
        """What the controller is told now."""
        now_s = self._events.now_s
        traffic = self._window.snapshot(now_s)
        uncached = traffic.uncached.mean if traffic.uncached.count else traffic.isl.mean
        workers = self._cluster.workers.values()
        return Observation(
            workers=tuple(self._facts(worker, now_s) for worker in workers),
            traffic=traffic,
            forecast=self._panel.forecast(),
            speed=self._model.speed(uncached) if traffic.isl.count else None,
            flip_s=self._flip_s,
        )

    def _facts(self, worker: Worker, now_s: float) -> WorkerFacts:
        size = worker.model.bytes_per_token
        total = worker.model.kv_tokens
        headroom = max(0, total - worker.kv_tokens_used) * size if total else UNBOUNDED_BYTES
        return WorkerFacts(
            worker_id=worker.worker_id,
            role=worker.role,
            epoch=worker.epoch,
            heard_s=now_s,
            draining=worker.draining,
            running=worker.running,
            waiting=worker.waiting,
            pending_prefill_tokens=worker.prompt_tokens if worker.role is not Role.DECODE else 0,
            stock_bytes=worker.stock_tokens * size,
            headroom_bytes=headroom,
        )

    def _tick(self, _: None) -> None:
        now_s = self._events.now_s
        second = math.floor(now_s)
        for rate in self._window.arrivals_by_bucket(now_s, min(second - self._fed_s, int(self._window.span_s))):
            self._panel.observe(rate)
        self._fed_s = second
        decision = self.controller.step(self.observe(), now_s)
        self.considered += 1
        self._cluster.fleet.counsel.take(advice_of(decision), now_s)
        if decision.cancels:
            self._cancelled.add(decision.cancels)
        if decision.action is not Action.NONE or decision.cancels:
            self.decisions.append(decision)
        if decision.action.lasting:
            self._carry_out(decision)
        if now_s + self._options.interval_s <= self._until_s:
            self._events.at(now_s + self._options.interval_s, self._tick, None)

    def _carry_out(self, decision: Decision) -> None:
        now_s, options = self._events.now_s, self._options
        for flip in decision.flips:
            worker = self._cluster.workers.get(flip.worker_id)
            if worker is None or worker.epoch != flip.expected_epoch or worker.draining:
                self.controller.failed(decision.number, f"{flip.worker_id} is not as expected", now_s)
                return
            self._drain(worker)
            self._events.at(now_s, self._flip, (worker, flip, now_s))
        if decision.action is Action.SCALE_UP and decision.role is not None:
            if self._starts(decision.role):
                self._events.at(now_s + options.start_s, self._ready, decision)
        elif decision.action is Action.SCALE_DOWN:
            worker = self._cluster.workers.get(decision.worker_id)
            if worker is not None:
                self._drain(worker)
                self._events.at(now_s, self._leave, (worker, now_s))

    def _drain(self, worker: Worker) -> None:
        cluster = self._cluster
        cluster.renew(worker, role=worker.role, epoch=worker.epoch, draining=True)
        cluster.give_back(worker.take_queued())

    def _flip(self, change: tuple[Worker, Flip, float]) -> None:
        """Wait until it is drained, then change the role."""
        worker, _, began_s = change
        now_s = self._events.now_s
        if not worker.alive:
            return
        if not self._drained(worker, now_s - began_s):
            self._events.at(now_s + POLL_S, self._flip, change)
            return
        self._events.at(now_s + self._options.flip_s, self._flipped, change)

    def _flipped(self, change: tuple[Worker, Flip, float]) -> None:
        worker, flip, began_s = change
        if worker.alive:
            self._flip_s = max(self._flip_s, self._events.now_s - began_s)
            self._cluster.renew(worker, role=flip.role, epoch=worker.epoch + 1, draining=False)
            self._note_roles()

    def _drained(self, worker: Worker, lasted_s: float) -> bool:
        if worker.role.decodes and lasted_s >= self._options.drain_s:
            self._cluster.hand_over(worker)
        return worker.empty

    def _ready(self, decision: Decision) -> None:
        if decision.number not in self._cancelled:
            assert decision.role is not None
            self._cluster.add(decision.role, self._model)
            self._note_roles()

    def _leave(self, change: tuple[Worker, float]) -> None:
        worker, began_s = change
        now_s = self._events.now_s
        if not worker.alive:
            return
        if self._drained(worker, now_s - began_s) and not worker.stock:
            self._cluster.remove(worker)
            self._note_roles()
        else:
            self._events.at(now_s + POLL_S, self._leave, change)

    def _note_roles(self) -> None:
        roles = [worker.role for worker in self._cluster.workers.values()]
        counts = (roles.count(Role.PREFILL), roles.count(Role.DECODE), roles.count(Role.MIXED))
        self.roles.append((self._events.now_s, *counts))
