"""The prefill side of a worker at work: the desk between sessions, the step thread and the KV transfer.

All methods run on the event loop. Each input is followed by one pump: orders go to the engine in one command,
sessions with news are woken, the timer is set to the next lease deadline.
"""

import asyncio
from collections.abc import Callable, Iterable

from weir.attempts.desk import AddRequest, CancelRequest
from weir.attempts.leg import EnginePort, Leg, RouterSession
from weir.clock import Clock
from weir.engine.engine import Engine
from weir.engine.output import Event
from weir.engine.request import EngineRequest
from weir.ids import RequestKey
from weir.services.prefill.desk import Order, PrefillDesk
from weir.services.prefill.traces import PrefillTraces
from weir.transfer.lease import LeaseEnd
from weir.transfer.plan import Completion

TIMER_SLACK_S = 0.001


class PrefillLeg(Leg[PrefillDesk, PrefillTraces]):
    """Owns the desk. ``leases_open(bool)`` is told whether completions may come."""

    def __init__(
        self,
        desk: PrefillDesk,
        port: EnginePort,
        clock: Clock,
        *,
        session_grace_s: float,
        leases_open: Callable[[bool], None] = lambda expected: None,
        traces: PrefillTraces | None = None,
    ) -> None:
        super().__init__(desk, port, clock, session_grace_s=session_grace_s, traces=traces)
        self._leases_open = leases_open
        self._timer: asyncio.TimerHandle | None = None

    # -- commands ---------------------------------------------------------------------------------------

    def begin(self, session: RouterSession, request: EngineRequest, lease_s: float, traceparent: str = "") -> None:
        """Start a prefill; ``traceparent`` is the trace it belongs to."""
        known = request.key in self.desk
        deadline_unix_s = None
        if request.deadline_monotonic_s is not None:
            left_s = request.deadline_monotonic_s - self._clock.monotonic_s()
            deadline_unix_s = self._clock.unix_s() + left_s
        self.desk.begin(session.name, request, lease_s, deadline_unix_s)
        if self._traces is not None and not known and request.key in self.desk:
            self._traces.begin(request.key, traceparent, request.context_len)

    def release(self, key: RequestKey, lease_id: int) -> None:
        """The router says that a lease may end."""
        self.desk.release(key, lease_id)

    def completed(self, done: Completion) -> None:
        """A reader says that it has proven all KV of a lease."""
        self.desk.release(done.key, done.lease_id)
        self.pump()

    def end_waiting(self, message: str) -> None:
        """End what has not begun to run."""
        self.desk.end_waiting(message)
        self.pump()

    def end_everything(self, message: str, reason: LeaseEnd) -> None:
        """End all attempts."""
        self.desk.end_everything(message, reason)
        self.pump()

    def close(self) -> None:
        """Stop all timers."""
        self._cancel_lost()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- engine -----------------------------------------------------------------------------------------

    def on_events(self, events: Iterable[Event]) -> None:
        """An engine step's events."""
        if self._traces is not None:
            self._traces.on_events(events)
        self.desk.on_events(events, self._clock.unix_s())
        self.pump()

    # -- inside -----------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Act on what was told to the desk since the last pump."""
        self._submit(self.desk.take_orders(), self._execute)
        self._wake_sessions()
        self._leases_open(self.desk.leases.open_count > 0)
        self._arm()
        self._say_idle(not len(self.desk))

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_unix_s = self.desk.next_deadline()
        if due_unix_s is not None:
            wait_s = max(0.0, due_unix_s - self._clock.unix_s()) + TIMER_SLACK_S
            self._timer = self._loop.call_later(wait_s, self._expire)

    def _expire(self) -> None:
        self.desk.expire(self._clock.unix_s())
        self.pump()

    def _execute(self, engine: Engine, order: Order) -> None:
        """Runs on the step thread."""
        if isinstance(order, AddRequest):
            self._add(engine, order.request)
        elif isinstance(order, CancelRequest):
            engine.cancel(order.key)
        else:
            engine.release_kv(order.key)
