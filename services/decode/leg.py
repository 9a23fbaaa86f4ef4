"""The decode side of a worker at work: the desk between sessions, the step thread and the KV reads.

All methods run on the event loop. Each input is followed by one pump: orders go to the engine in one command,
reads are begun, sessions with news are woken. A read's result reaches the engine in the same turn of the loop,
so the step that decodes begins at once; nothing is polled.
"""

import asyncio
import functools
import logging
from collections.abc import Callable, Iterable

from weir.attempts.desk import AddRequest, CancelRequest
from weir.attempts.leg import EnginePort, Leg, RouterSession
from weir.clock import Clock
from weir.engine.engine import Engine
from weir.engine.output import Event
from weir.engine.request import EngineRequest
from weir.errors import FingerprintMismatch, KvReadVoid, WeirError
from weir.ids import RequestKey, WorkerKey
from weir.services.decode.desk import (
    AbortReads,
    BeginRead,
    DecodeDesk,
    GiveFirstToken,
    KvArrived,
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


class DecodeLeg(Leg[DecodeDesk, DecodeTraces]):
    """Owns the desk and the tasks of the reads. ``on_read`` hears of each proven read, ``on_void`` of each other
    one, ``on_completed`` of each lease whose KV has been proven. ``check_room(peer)`` raises when there is none
    for a connection to it.
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
        check_room: Callable[[WorkerKey], None] = lambda peer: None,
        traces: DecodeTraces | None = None,
    ) -> None:
        super().__init__(desk, port, clock, session_grace_s=session_grace_s, traces=traces)
        self._transfer = transfer
        self._read_timeout_s = read_timeout_s
        self._slots = asyncio.Semaphore(max_outstanding_reads)
        self._on_read = on_read
        self._on_void = on_void
        self._on_completed = on_completed
        self._check_room = check_room
        self._reads: dict[RequestKey, set[asyncio.Task[ReadReport]]] = {}
        self._peers: dict[WorkerKey, PeerDescriptor] = {}
        self._connected: set[WorkerKey] = set()
        self._side_tasks: set[asyncio.Task[None]] = set()

    # -- commands ---------------------------------------------------------------------------------------

    def begin(
        self, session: RouterSession, request: EngineRequest, source: PeerDescriptor | None, traceparent: str = ""
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

    def offer(self, ticket: Ticket) -> None:
        """KV that may be read."""
        self.desk.offer(ticket, self._clock.unix_s(), self._clock.monotonic_s())

    def malformed_ticket(self, key: RequestKey, void: KvReadVoid) -> None:
        """What came is no ticket."""
        self.desk.malformed_ticket(key, void)

    def first_token(self, key: RequestKey, index: int, token: int) -> None:
        """A first token that was sampled elsewhere."""
        self.desk.first_token(key, index, token, self._clock.monotonic_s())

    def end_waiting(self, message: str) -> None:
        """End what has no blocks yet."""
        self.desk.end_waiting(message)
        self.pump()

    def end_everything(self, message: str) -> None:
        """End all attempts."""
        self.desk.end_everything(message)
        self.pump()

    def peer_gone(self, worker: WorkerKey) -> None:
        """A worker is dead or replaced: drop what is held for it; its reads end void."""
        self._connected.discard(worker)
        if self._peers.pop(worker, None) is not None:
            self._spawn(self._transfer.disconnect(worker))

    async def close(self) -> None:
        """Abort all reads and wait for them."""
        tasks = [task for tasks in self._reads.values() for task in tasks]
        for task in [*tasks, *self._side_tasks]:
            task.cancel()
        await asyncio.gather(*tasks, *self._side_tasks, return_exceptions=True)
        self._cancel_lost()

    # -- engine -----------------------------------------------------------------------------------------

    def on_events(self, events: Iterable[Event]) -> None:
        """An engine step's events."""
        if self._traces is not None:
            self._traces.on_events(events)
        self.desk.on_events(events, self._clock.monotonic_s())
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
            await self._connect(order.peer)
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

    async def _connect(self, peer: PeerDescriptor) -> None:
        if peer.worker not in self._connected:
            self._check_room(peer.worker)
        await self._transfer.connect(peer)
        self._connected.add(peer.worker)

    def _connect_early(self, peer: PeerDescriptor) -> None:
        self._know(peer)
        self._spawn(self._try_to_connect(peer))

    async def _try_to_connect(self, peer: PeerDescriptor) -> None:
        try:
            await self._connect(peer)
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
        self._submit(engine_orders, self._execute)
        self._wake_sessions()
        self._say_idle(not len(self.desk) and not self._reads)

    def _execute(self, engine: Engine, order: Order) -> None:
        """Runs on the step thread."""
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
