"""The prefill side of a worker at work: the desk between sessions, the step thread and the KV transfer.

All methods run on the event loop. Each input is followed by one pump: orders go to the engine in one command,
sessions with news are woken, the timer is set to the next lease deadline.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol

from weir.clock import Clock
from weir.engine.engine import Engine
from weir.engine.output import Event
from weir.engine.request import EngineRequest
from weir.errors import WeirError
from weir.ids import RequestKey
from weir.services.prefill.desk import AddRequest, CancelRequest, News, Order, PrefillDesk
from weir.services.prefill.traces import PrefillTraces
from weir.transfer.lease import LeaseEnd
from weir.transfer.plan import Completion

TIMER_SLACK_S = 0.001


class EnginePort(Protocol):
    """The way to the step thread."""

    def submit(self, command: Callable[[Engine], None]) -> None:
        """Run ``command`` on the step thread before its next step."""
        ...

    def interrupt(self, key: RequestKey) -> None:
        """A cancel of ``key`` is coming: do not finish a step that works mostly for it."""
        ...


class PrefillSession:
    """A router's stream, as the leg sees it."""

    def __init__(self, name: str, router_id: str) -> None:
        self.name = name
        self.router_id = router_id
        self.wake = asyncio.Event()
        self.ended = False
        self.error: WeirError | None = None
        """What the stream ends with, if not well."""

    def end(self, error: WeirError | None = None) -> None:
        """No more news will be sent."""
        self.ended = True
        self.error = self.error or error
        self.wake.set()


class PrefillLeg:
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
        self.desk = desk
        self._port = port
        self._clock = clock
        self._grace_s = session_grace_s
        self._leases_open = leases_open
        self._traces = traces
        self._loop = asyncio.get_running_loop()
        self._sessions: dict[str, PrefillSession] = {}
        self._lost: dict[str, tuple[str, asyncio.TimerHandle]] = {}
        self._opened = 0
        self._timer: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def open_sessions(self) -> int:
        """Streams that are up."""
        return len(self._sessions)

    # -- sessions ---------------------------------------------------------------------------------------

    def open(self, router_id: str) -> PrefillSession:
        """A router's new stream; what an older stream of the same router left behind is stopped."""
        for session in [one for one in self._sessions.values() if one.router_id == router_id]:
            self._sessions.pop(session.name)
            session.end()
            self.desk.end_session(session.name)
        for name in [name for name, (router, _) in self._lost.items() if router == router_id]:
            self._end_lost(name)
        self._opened += 1
        opened = PrefillSession(f"{router_id}#{self._opened}", router_id)
        self._sessions[opened.name] = opened
        self.desk.open_session(opened.name)
        self.pump()
        return opened

    def lose(self, session: PrefillSession) -> None:
        """The stream is gone; its attempts are stopped after the grace. Idempotent."""
        session.end()
        if self._sessions.pop(session.name, None) is None:
            return
        self.desk.drop_news(session.name)
        timer = self._loop.call_later(self._grace_s, self._end_lost, session.name)
        self._lost[session.name] = (session.router_id, timer)

    def _end_lost(self, name: str) -> None:
        _, timer = self._lost.pop(name)
        timer.cancel()
        self.desk.end_session(name)
        self.pump()

    def take_news(self, session: PrefillSession) -> list[News]:
        """News to send; ResourceExhausted when the router does not keep up."""
        return self.desk.take_news(session.name)

    # -- commands ---------------------------------------------------------------------------------------

    def begin(self, session: PrefillSession, request: EngineRequest, lease_s: float, traceparent: str = "") -> None:
        """Start a prefill; ``traceparent`` is the trace it belongs to."""
        known = request.key in self.desk
        deadline_unix_s = None
        if request.deadline_monotonic_s is not None:
            left_s = request.deadline_monotonic_s - self._clock.monotonic_s()
            deadline_unix_s = self._clock.unix_s() + left_s
        self.desk.begin(session.name, request, lease_s, deadline_unix_s)
        if self._traces is not None and not known and request.key in self.desk:
            self._traces.begin(request.key, traceparent, request.context_len)

    def refuse(self, session: PrefillSession, key: RequestKey, error: WeirError) -> None:
        """Tell the router that a prefill is not begun."""
        self.desk.refuse(session.name, key, error)

    def cancel(self, request_id: str, attempt: int, reason: str) -> None:
        """Stop an attempt and older ones."""
        self.desk.cancel(request_id, attempt, reason)

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

    async def wait_idle(self) -> None:
        """Return when no attempt is left."""
        await self._idle.wait()

    def close(self) -> None:
        """Stop all timers."""
        for _, timer in self._lost.values():
            timer.cancel()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close_sessions(self, error: WeirError | None = None) -> None:
        """Let the streams end after what they still have to send, with ``error`` if there is one."""
        for session in list(self._sessions.values()):
            session.end(error)

    # -- engine -----------------------------------------------------------------------------------------

    def on_events(self, events: Iterable[Event]) -> None:
        """An engine step's events."""
        if self._traces is not None:
            self._traces.on_events(events)
        self.desk.on_events(events, self._clock.unix_s())
        self.pump()

    def engine_lost(self, error: WeirError) -> None:
        """The step thread died."""
        if self._traces is not None:
            self._traces.engine_lost(error)
        self.desk.engine_lost(error)
        self.pump()

    def _refused(self, key: RequestKey, error: WeirError) -> None:
        if self._traces is not None:
            self._traces.refused(key, error)
        self.desk.refused(key, error)
        self.pump()

    # -- inside -----------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Act on what was told to the desk since the last pump."""
        orders = self.desk.take_orders()
        if orders:
            self._port.submit(lambda engine: self._execute(engine, orders))
            for order in orders:
                if isinstance(order, CancelRequest):
                    self._port.interrupt(order.key)
        for session in self._sessions.values():
            if self.desk.has_news(session.name):
                session.wake.set()
        self._leases_open(self.desk.leases.open_count > 0)
        self._arm()
        if len(self.desk):
            self._idle.clear()
        else:
            self._idle.set()

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

    def _execute(self, engine: Engine, orders: list[Order]) -> None:
        """Runs on the step thread."""
        for order in orders:
            if isinstance(order, AddRequest):
                self._add(engine, order.request)
            elif isinstance(order, CancelRequest):
                engine.cancel(order.key)
            else:
                engine.release_kv(order.key)

    def _add(self, engine: Engine, request: EngineRequest) -> None:
        try:
            engine.add(request)
        except WeirError as error:
            self._loop.call_soon_threadsafe(self._refused, request.key, error)
