"""The balance loop: observe, decide, tell, act; once an interval.

bus ─► senses ─► observation ─► BalanceController ─► decision ─► event, log line, metrics
registry ──────────┘                   ▲                 └─► actuator (auto only; one task at a time)
                                       └── failed ◄──────────────┘
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable

from google.protobuf.message import DecodeError

from weir.balance.decide import BalanceController
from weir.balance.decision import Action, Decision
from weir.clock import Clock
from weir.errors import FailedPrecondition, WeirError
from weir.events.bus import Event, EventBus, Subscription
from weir.events.registry import Registry
from weir.events.subjects import ALL_LOADS, ALL_REQUESTS, DECISION
from weir.rpc.v1 import events_pb2
from weir.services.controller.actuators import Actuator
from weir.services.controller.senses import Senses
from weir.services.controller.telling import DecisionLog, decision_event, log_fields
from weir.telemetry.logs import log
from weir.telemetry.metrics import ControllerMetrics

_log = logging.getLogger(__name__)


class BalanceLoop:
    """``open`` once, ``close`` once. With ``dry_run`` nothing is carried out, and nothing waits for it."""

    def __init__(
        self,
        controller: BalanceController,
        senses: Senses,
        *,
        registry: Registry,
        bus: EventBus,
        clock: Clock,
        actuator: Actuator,
        decisions: DecisionLog,
        metrics: ControllerMetrics,
        origin: Callable[[], events_pb2.EventOrigin],
        interval_s: float,
        dry_run: bool,
    ) -> None:
        self.controller = controller
        self.senses = senses
        self.decisions = decisions
        self.dry_run = dry_run
        self._registry = registry
        self._bus = bus
        self._clock = clock
        self._actuator = actuator
        self._metrics = metrics
        self._origin = origin
        self._interval_s = interval_s
        self._subscriptions: list[Subscription] = []
        self._task: asyncio.Task[None] | None = None
        self._action: asyncio.Task[None] | None = None
        self._last_kind = ""
        for action in Action:
            metrics.decisions.labels(action.value)

    async def open(self) -> None:
        """Subscribe, then begin. Raises Unavailable when the subscriptions are not confirmed."""
        self._subscriptions.append(await self._bus.subscribe(ALL_REQUESTS, self._guarded(self._on_request)))
        self._subscriptions.append(await self._bus.subscribe(ALL_LOADS, self._guarded(self._on_load)))
        self._task = asyncio.create_task(self._run(), name="balance loop")

    async def close(self) -> None:
        """Stop deciding; an action under way is given up. Idempotent."""
        for task in (self._task, self._action):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        self._task = self._action = None
        for subscription in self._subscriptions:
            await subscription.unsubscribe()
        self._subscriptions.clear()

    @property
    def pending(self) -> int:
        """Number of the decision under way; 0 for none."""
        return 0 if self.controller.pending is None else self.controller.pending.decision.number

    async def cancel(self, number: int) -> None:
        """Give up the pending decision ``number``; FailedPrecondition when another one, or none, is pending."""
        if self.pending != number or not number:
            raise FailedPrecondition(f"decision {number} is not pending; pending: {self.pending or 'none'}")
        decision = self.controller.cancel(self._clock.monotonic_s())
        assert decision is not None
        await self._settle(decision)

    async def tick(self) -> None:
        """One round."""
        now_s = self._clock.monotonic_s()
        seen = self.senses.observe(self._registry.snapshot(), self._registry.stale, now_s)
        decision = self.controller.step(seen, now_s)
        if seen.forecast is not None and math.isfinite(seen.forecast.error):
            self._metrics.forecast_error.set(seen.forecast.error)
        self._metrics.used.set(decision.inputs.get("used", 0.0))
        await self._settle(decision)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                await self.tick()
            except WeirError as error:
                log(_log, logging.WARNING, "balance: nothing decided", error=error)
            except Exception:
                # A fault in judging must neither end the loop nor the process that serves the operators.
                _log.exception("balance: nothing decided")

    async def _settle(self, decision: Decision) -> None:
        self._metrics.decisions.labels(decision.action.value).inc()
        event = decision_event(decision, self._origin(), self._clock, dry_run=self.dry_run)
        self.decisions.add(event)
        self._write(decision)
        if decision.cancels and self._action is not None:
            self._action.cancel()
        if decision.action.lasting:
            if self.dry_run:
                self.controller.cancel(self._clock.monotonic_s())
            else:
                self._begin(decision)
        await self._bus.publish(DECISION, event.SerializeToString())

    def _write(self, decision: Decision) -> None:
        """One line a decision; the same again, without anything being changed, is not worth one at this level."""
        quiet = not (decision.action.lasting or decision.cancels)
        kind = decision.action.value
        level = logging.DEBUG if quiet and kind == self._last_kind else logging.INFO
        self._last_kind = kind
        log(_log, level, "advice" if self.dry_run else "decision", **log_fields(decision))

    def _begin(self, decision: Decision) -> None:
        if self._action is not None:
            self._action.cancel()
        self._action = asyncio.create_task(self._carry_out(decision), name=f"decision {decision.number}")

    async def _carry_out(self, decision: Decision) -> None:
        try:
            await self._actuator.carry_out(decision)
        except WeirError as error:
            log(_log, logging.WARNING, "decision not carried out", number=decision.number, error=error)
            self.controller.failed(decision.number, str(error), self._clock.monotonic_s())

    def _on_request(self, payload: bytes) -> None:
        self.senses.lifecycle(events_pb2.LifecycleEvent.FromString(payload), self._clock.monotonic_s())

    def _on_load(self, payload: bytes) -> None:
        self.senses.load(events_pb2.LoadEvent.FromString(payload), self._clock.monotonic_s())

    def _guarded(self, handle: Callable[[bytes], None]) -> Callable[[Event], None]:
        def on_event(event: Event) -> None:
            try:
                handle(event.payload)
            except (DecodeError, WeirError) as error:
                log(_log, logging.WARNING, "event dropped", subject=event.subject, error=error)

        return on_event
