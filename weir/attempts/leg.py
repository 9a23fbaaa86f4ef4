"""One leg of a worker at work: the desk between the routers' sessions and the step thread.

All methods run on the event loop. Each input is followed by one pump, which carries out the desk's orders and wakes
the sessions that have news.
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from weir.attempts.desk import AttemptDesk, CancelRequest
from weir.clock import Clock
from weir.engine.engine import Engine
from weir.engine.output import Event
from weir.engine.request import EngineRequest
from weir.errors import WeirError
from weir.ids import RequestKey


class EnginePort(Protocol):
    """The way to the step thread."""

    def submit(self, command: Callable[[Engine], None]) -> None:
        """Run ``command`` on the step thread before its next step."""
        ...

    def interrupt(self, key: RequestKey) -> None:
        """A cancel of ``key`` is coming: do not finish a step that works mostly for it."""
        ...


class AttemptTraces(Protocol):
    """Spans of the attempts that are sampled."""

    def on_events(self, events: Iterable[Event]) -> None:
        """An engine step's events."""
        ...

    def refused(self, key: RequestKey, error: WeirError) -> None:
        """The engine did not take it."""
        ...

    def engine_lost(self, error: WeirError) -> None:
        """No event will come any more."""
        ...


class RouterSession:
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


D = TypeVar("D", bound=AttemptDesk[Any, Any, Any])
T = TypeVar("T", bound=AttemptTraces)


class Leg(abc.ABC, Generic[D, T]):
    """Owns the desk and the sessions."""

    def __init__(
        self, desk: D, port: EnginePort, clock: Clock, *, session_grace_s: float, traces: T | None = None
    ) -> None:
        self.desk = desk
        self._port = port
        self._clock = clock
        self._grace_s = session_grace_s
        self._traces = traces
        self._loop = asyncio.get_running_loop()
        self._sessions: dict[str, RouterSession] = {}
        self._lost: dict[str, tuple[str, asyncio.TimerHandle]] = {}
        self._opened = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def open_sessions(self) -> int:
        """Streams that are up."""
        return len(self._sessions)

    @abc.abstractmethod
    def pump(self) -> None:
        """Act on what was told to the desk since the last pump."""

    # -- sessions ---------------------------------------------------------------------------------------

    def open(self, router_id: str) -> RouterSession:
        """A router's new stream; what an older stream of the same router left behind is stopped."""
        for session in [one for one in self._sessions.values() if one.router_id == router_id]:
            self._sessions.pop(session.name)
            session.end()
            self.desk.end_session(session.name)
        for name in [name for name, (router, _) in self._lost.items() if router == router_id]:
            self._end_lost(name)
        self._opened += 1
        opened = RouterSession(f"{router_id}#{self._opened}", router_id)
        self._sessions[opened.name] = opened
        self.desk.open_session(opened.name)
        self.pump()
        return opened

    def lose(self, session: RouterSession) -> None:
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

    def take_news(self, session: RouterSession) -> list[Any]:
        """News to send, of the desk's kinds; ResourceExhausted when the router does not keep up."""
        return self.desk.take_news(session.name)

    def close_sessions(self, error: WeirError | None = None) -> None:
        """Let the streams end after what they still have to send, with ``error`` if there is one."""
        for session in list(self._sessions.values()):
            session.end(error)

    async def wait_idle(self) -> None:
        """Return when nothing of an attempt is left."""
        await self._idle.wait()

    # -- commands ---------------------------------------------------------------------------------------

    def refuse(self, session: RouterSession, key: RequestKey, error: WeirError) -> None:
        """Tell the router that an attempt is not begun."""
        self.desk.refuse(session.name, key, error)

    def cancel(self, request_id: str, attempt: int, reason: str) -> None:
        """Stop an attempt and older ones."""
        self.desk.cancel(request_id, attempt, reason)

    def engine_lost(self, error: WeirError) -> None:
        """The step thread died."""
        if self._traces is not None:
            self._traces.engine_lost(error)
        self.desk.engine_lost(error)
        self.pump()

    # -- for the legs -----------------------------------------------------------------------------------

    def _submit(self, orders: Sequence[Any], execute: Callable[[Engine, Any], None]) -> None:
        """Have ``execute`` carry out each order on the step thread, all before its next step."""
        if not orders:
            return

        def run(engine: Engine) -> None:
            for order in orders:
                execute(engine, order)

        self._port.submit(run)
        for order in orders:
            if isinstance(order, CancelRequest):
                self._port.interrupt(order.key)

    def _wake_sessions(self) -> None:
        for session in self._sessions.values():
            if self.desk.has_news(session.name):
                session.wake.set()

    def _say_idle(self, idle: bool) -> None:
        if idle:
            self._idle.set()
        else:
            self._idle.clear()

    def _add(self, engine: Engine, request: EngineRequest) -> None:
        """Runs on the step thread."""
        try:
            engine.add(request)
        except WeirError as error:
            self._loop.call_soon_threadsafe(self._refused, request.key, error)

    def _refused(self, key: RequestKey, error: WeirError) -> None:
        if self._traces is not None:
            self._traces.refused(key, error)
        self.desk.refused(key, error)
        self.pump()

    def _cancel_lost(self) -> None:
        """Stop the timers of lost sessions."""
        for _, timer in self._lost.values():
            timer.cancel()
