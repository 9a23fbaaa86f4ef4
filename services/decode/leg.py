"""The decode side of a worker at work: the desk between sessions, the step thread and the KV reads.

All methods run on the event loop. Each input is followed by one pump: orders go to the engine in one command,
reads are begun, sessions with news are woken. A read's result reaches the engine in the same turn of the loop,
so the step that decodes begins at once; nothing is polled.
"""

import asyncio
import functools
import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from weir.clock import Clock
from weir.engine.engine import Engine
from weir.engine.output import Event
from weir.engine.request import EngineRequest
from weir.errors import FingerprintMismatch, KvReadVoid, WeirError
from weir.ids import RequestKey, WorkerKey
from weir.services.decode.desk import (
    AbortReads,
    AddRequest,
    BeginRead,
    CancelRequest,
    DecodeDesk,
    GiveFirstToken,
    KvArrived,
    News,
    Order,
    ReadsDone,
    TransferCompleted,
)
from weir.services.decode.reads import ReadResult
from weir.services.decode.traces import DecodeTraces
from weir.transfer.plan import KvTransfer, ReadReport
from weir.transfer.ticket import PeerDescriptor, Ticket, VoidReason

_log = logging.getLogger(__name__)

MIN_READ_TIMEOUT_S = 0.01
MAX_KNOWN_PEERS = 1024


class EnginePort(Protocol):
    """The way to the step thread."""

    def submit(self, command: Callable[[Engine], None]) -> None:
        """Run ``command`` on the step thread before its next step."""
        ...

    def interrupt(self, key: RequestKey) -> None:
        """A cancel of ``key`` is coming: do not finish a step that works mostly for it."""
        ...


class DecodeSession:
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


class DecodeLeg:
    """Owns the desk and the tasks of the reads. ``on_read`` hears of each proven read, ``on_void`` of each other
    one, ``on_completed`` of each lease whose KV has been proven.
    """

    def __init__(
        self,
        desk: DecodeDesk,
        port: EnginePort,
        transfer: KvTransfer,
        clock: Clock,
        *,
        session_grace_s: float,
        read_timeout_s: float,
        max_outstanding_reads: int,
        on_read: Callable[[BeginRead, ReadReport], None] = lambda order, report: None,
        on_void: Callable[[BeginRead, KvReadVoid], None] = lambda order, void: None,
        on_completed: Callable[[TransferCompleted], None] = lambda order: None,
        traces: DecodeTraces | None = None,
    ) -> None:
        self.desk = desk
        self._port = port
        self._transfer = transfer
        self._clock = clock
        self._grace_s = session_grace_s
        self._read_timeout_s = read_timeout_s
        self._slots = asyncio.Semaphore(max_outstanding_reads)
        self._on_read = on_read
        self._on_void = on_void
        self._on_completed = on_completed
        self._traces = traces
        self._loop = asyncio.get_running_loop()
        self._sessions: dict[str, DecodeSession] = {}
        self._lost: dict[str, tuple[str, asyncio.TimerHandle]] = {}
        self._opened = 0
        self._reads: dict[RequestKey, set[asyncio.Task[ReadReport]]] = {}
        self._peers: dict[WorkerKey, PeerDescriptor] = {}
        self._side_tasks: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def open_sessions(self) -> int:
        """Streams that are up."""
        return len(self._sessions)

    # -- sessions ---------------------------------------------------------------------------------------

    def open(self, router_id: str) -> DecodeSession:
        """A router's new stream; what an older stream of the same router left behind is stopped."""
        for session in [one for one in self._sessions.values() if one.router_id == router_id]:
            self._sessions.pop(session.name)
            session.end()
            self.desk.end_session(session.name)
        for name in [name for name, (router, _) in self._lost.items() if router == router_id]:
            self._end_lost(name)
        self._opened += 1
        opened = DecodeSession(f"{router_id}#{self._opened}", router_id)
        self._sessions[opened.name] = opened
        self.desk.open_session(opened.name)
        self.pump()
        return opened

    def lose(self, session: DecodeSession) -> None:
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

    def close_sessions(self, error: WeirError | None = None) -> None:
        """Let the streams end after what they still have to send, with ``error`` if there is one."""
        for session in list(self._sessions.values()):
            session.end(error)

    def take_news(self, session: DecodeSession) -> list[News]:
        """News to send; ResourceExhausted when the router does not keep up."""
        return self.desk.take_news(session.name)

    # -- commands ---------------------------------------------------------------------------------------

    def begin(
        self, session: DecodeSession, request: EngineRequest, source: PeerDescriptor | None, traceparent: str = ""
    ) -> None:
        """Start a sequence; ``source`` is the worker that its KV will be read from, if any; ``traceparent`` is
        the trace it belongs to.
        """
        known = request.key in self.desk
        self.desk.begin(session.name, request, source)
        if self._traces is not None and not known and request.key in self.desk:
            self._traces.begin(request.key, traceparent, request.context_len, remote=source is not None)
        if source is not None and source.worker not in self._peers:
            self._connect_early(source)

    def refuse(self, session: DecodeSession, key: RequestKey, error: WeirError) -> None:
        """Tell the router that a sequence is not begun."""
        self.desk.refuse(session.name, key, error)

    def offer(self, ticket: Ticket) -> None:
        """KV that may be read."""
        self.desk.offer(ticket, self._clock.unix_s(), self._clock.monotonic_s())

    def malformed_ticket(self, key: RequestKey, void: KvReadVoid) -> None:
        """What came is no ticket."""
        self.desk.malformed_ticket(key, void)

    def first_token(self, key: RequestKey, index: int, token: int) -> None:
        """A first token that was sampled elsewhere."""
        self.desk.first_token(key, index, token, self._clock.monotonic_s())

    def cancel(self, request_id: str, attempt: int, reason: str) -> None:
        """Stop an attempt and older ones."""
        self.desk.cancel(request_id, attempt, reason)

    def end_waiting(self, message: str) -> None:
        """End what has no blocks yet."""
        self.desk.end_waiting(message)
        self.pump()

    def end_everything(self, message: str) -> None:
        """End all attempts."""
        self.desk.end_everything(message)
        self.pump()

    async def wait_idle(self) -> None:
        """Return when no attempt is left and no read is under way."""
        await self._idle.wait()

    def peer_gone(self, worker: WorkerKey) -> None:
        """A worker is dead or replaced: drop what is held for it; its reads end void."""
        if self._peers.pop(worker, None) is not None:
            self._spawn(self._transfer.disconnect(worker))

    async def close(self) -> None:
        """Abort all reads and wait for them."""
        tasks = [task for tasks in self._reads.values() for task in tasks]
        for task in [*tasks, *self._side_tasks]:
            task.cancel()
        await asyncio.gather(*tasks, *self._side_tasks, return_exceptions=True)
        for _, timer in self._lost.values():
            timer.cancel()

    # -- engine -----------------------------------------------------------------------------------------

    def on_events(self, events: Iterable[Event]) -> None:
        """An engine step's events."""
        if self._traces is not None:
            self._traces.on_events(events)
        self.desk.on_events(events, self._clock.monotonic_s())
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

    # -- reads ------------------------------------------------------------------------------------------

    def _begin_read(self, order: BeginRead) -> None:
        if self._traces is not None:
            self._traces.read_begun(order)
        task = asyncio.create_task(self._read(order), name=f"kv-read-{order.key}-{order.read.read_id}")
        self._reads.setdefault(order.key, set()).add(task)
        # The result is taken here and not in the coroutine: a task that is cancelled early never runs.
        task.add_done_callback(functools.partial(self._read_ended, order))

    async def _read(self, order: BeginRead) -> ReadReport:
        async with self._slots:
            ticket = order.read.ticket
            await self._transfer.connect(order.peer)
            self._know(order.peer)
            left_s = ticket.deadline_unix_s - self._clock.unix_s()
            timeout_s = max(MIN_READ_TIMEOUT_S, min(self._read_timeout_s, left_s))
            return await self._transfer.read(
                ticket, order.read.destinations, timeout_s=timeout_s, notify=order.read.notify
            )

    def _read_ended(self, order: BeginRead, task: asyncio.Task[ReadReport]) -> None:
        tasks = self._reads[order.key]
        tasks.discard(task)
        if not tasks:
            del self._reads[order.key]
        now_s = self._clock.monotonic_s()
        void = _void_of(task)
        if self._traces is not None:
            self._traces.read_ended(order, task.result() if void is None else None, void)
        if void is None:
            report = task.result()
            result = ReadResult(report.bytes, report.descriptors, report.transport, report.guard_s, report.checksum_s)
            self.desk.read_proven(order.key, order.read.read_id, result, now_s)
            self.pump()
            self._on_read(order, report)
        else:
            _log.info("read %d of %s is void: %s", order.read.read_id, order.key, void)
            self.desk.read_void(order.key, order.read.read_id, void, now_s)
            self.pump()
            self._on_void(order, void)

    def _connect_early(self, peer: PeerDescriptor) -> None:
        self._know(peer)
        self._spawn(self._connect(peer))

    async def _connect(self, peer: PeerDescriptor) -> None:
        try:
            await self._transfer.connect(peer)
        except WeirError as error:
            # The read itself will fail with it, and tell the router.
            _log.warning("cannot connect to %s: %s", peer.worker, error)

    def _know(self, peer: PeerDescriptor) -> None:
        if len(self._peers) >= MAX_KNOWN_PEERS and peer.worker not in self._peers:
            self.peer_gone(next(iter(self._peers)))
        self._peers[peer.worker] = peer

    def _spawn(self, coroutine: object) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(coroutine)  # type: ignore[call-overload]
        self._side_tasks.add(task)
        task.add_done_callback(self._side_tasks.discard)

    # -- inside -----------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Act on what was told to the desk since the last pump."""
        engine_orders: list[Order] = []
        for order in self.desk.take_orders():
            if isinstance(order, BeginRead):
                self._begin_read(order)
            elif isinstance(order, AbortReads):
                for task in self._reads.get(order.key, ()):
                    task.cancel()
            elif isinstance(order, TransferCompleted):
                self._on_completed(order)
            else:
                engine_orders.append(order)
        if engine_orders:
            self._port.submit(lambda engine: self._execute(engine, engine_orders))
            for order in engine_orders:
                if isinstance(order, CancelRequest):
                    self._port.interrupt(order.key)
        for session in self._sessions.values():
            if self.desk.has_news(session.name):
                session.wake.set()
        if len(self.desk) or self._reads:
            self._idle.clear()
        else:
            self._idle.set()

    def _execute(self, engine: Engine, orders: list[Order]) -> None:
        """Runs on the step thread."""
        for order in orders:
            if isinstance(order, AddRequest):
                self._add(engine, order.request)
            elif isinstance(order, CancelRequest):
                engine.cancel(order.key)
            elif isinstance(order, GiveFirstToken):
                engine.first_token(order.key, order.token)
            elif isinstance(order, KvArrived):
                engine.kv_arrived(order.key, order.num_tokens)
            elif isinstance(order, ReadsDone):
                engine.reads_done(order.key)

    def _add(self, engine: Engine, request: EngineRequest) -> None:
        try:
            engine.add(request)
        except WeirError as error:
            self._loop.call_soon_threadsafe(self._refused, request.key, error)


def _void_of(task: asyncio.Task[ReadReport]) -> KvReadVoid | None:
    """Why the read's result may not be used; None when it is proven."""
    if task.cancelled():
        return KvReadVoid(VoidReason.TRANSPORT.value, "the read was aborted")
    error = task.exception()
    if error is None or isinstance(error, KvReadVoid):
        return error
    if isinstance(error, FingerprintMismatch):
        return KvReadVoid(VoidReason.FINGERPRINT.value, str(error))
    if not isinstance(error, WeirError):
        _log.error("KV read failed", exc_info=error)
    return KvReadVoid(VoidReason.TRANSPORT.value, f"{type(error).__name__}: {error}")
