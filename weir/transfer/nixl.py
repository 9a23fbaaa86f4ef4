"""KV reads over NIXL (UCX: RDMA, NVLink, shared memory, TCP): the asyncio face of ``ReadThread``."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeVar

from weir.clock import Clock, SystemClock
from weir.errors import FingerprintMismatch, ResourceExhausted, TransferUnavailable, WeirError
from weir.ids import WorkerKey
from weir.kvcache.pool import KvPool
from weir.transfer.fingerprint import Fingerprint
from weir.transfer.plan import (
    MAX_DESCRIPTOR_BYTES,
    Completion,
    Destination,
    PeerTable,
    ReadReport,
    check_read,
)
from weir.transfer.reader import ReadThread
from weir.transfer.ticket import PeerDescriptor, Ticket
from weir.transfer.under_way import Outcome, Probe, Read

MAX_OUTSTANDING = 256
MAX_COMPLETIONS = 4096
CONNECT_TIMEOUT_S = 5.0

_T = TypeVar("_T")

log = logging.getLogger(__name__)


class NixlTransfer:
    """``KvTransfer`` between processes. Construction starts NIXL (some 0.3 s) or raises TransferUnavailable.

    Owns a thread and two NIXL agents until ``close``; ``pool`` must outlive it and not move.
    ``host_id`` names the machine (or container) in log lines and in choosing what a transport is known by.
    """

    def __init__(
        self,
        pool: KvPool,
        worker: WorkerKey,
        fingerprint: Fingerprint,
        *,
        host_id: str = "",
        clock: Clock | None = None,
        max_descriptor_bytes: int = MAX_DESCRIPTOR_BYTES,
        max_outstanding: int = MAX_OUTSTANDING,
    ) -> None:
        self._pool = pool
        self._worker = worker
        self._fingerprint = fingerprint
        self._host_id = host_id
        self._clock = clock if clock is not None else SystemClock()
        self._max_outstanding = max_outstanding
        self._peers = PeerTable(fingerprint)
        self._outstanding = 0
        self._completions: asyncio.Queue[Completion | None] = asyncio.Queue(MAX_COMPLETIONS)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._consumed = False
        self._expected = True
        self._closed = False
        self._thread = ReadThread(pool, str(worker), self._clock, max_descriptor_bytes, self._completed)
        self._thread.start()

    def descriptor(self) -> PeerDescriptor:
        on_cpu = self._pool.device.type == "cpu"
        return PeerDescriptor(
            worker=self._worker,
            fingerprint=self._fingerprint,
            agent_metadata=self._thread.agent_metadata,
            memory="DRAM" if on_cpu else "VRAM",
            device_id=0 if on_cpu else self._pool.device.index or 0,
            pool_base=self._pool.base,
            block_bytes=self._pool.layout.block_bytes,
            num_blocks=self._pool.num_blocks,
            guard_base=self._pool.guard.base,
            host_id=self._host_id,
        )

    async def connect(self, peer: PeerDescriptor) -> None:
        self._check_open()
        if peer.block_bytes != self._pool.layout.block_bytes:
            raise FingerprintMismatch("block_bytes", self._pool.layout.block_bytes, peer.block_bytes)
        known = self._peers.knows(peer.worker)
        replaced = self._peers.admit(peer)
        if replaced is not None:
            log.info("worker %s replaces %s", peer.worker, replaced.worker)
            await self._drop(replaced.worker)
        if known:
            return
        failure = await self._probe(peer)
        if failure is not None:
            self._peers.drop(peer.worker)
            raise failure

    async def disconnect(self, worker: WorkerKey) -> None:
        if self._peers.drop(worker) is not None and not self._closed:
            await self._drop(worker)

    async def read(
        self, ticket: Ticket, destinations: Sequence[Destination], *, timeout_s: float, notify: bool
    ) -> ReadReport:
        self._check_open()
        peer = self._peers.source_of(ticket)
        check_read(ticket, destinations, peer, self._fingerprint, self._clock.unix_s(), self._pool.num_blocks)
        if self._outstanding >= self._max_outstanding:
            raise ResourceExhausted(f"{self._outstanding} KV reads are under way, the limit")
        loop = asyncio.get_running_loop()
        settled: asyncio.Future[Outcome] = loop.create_future()
        now = self._clock.monotonic_s()
        read = Read(
            peer=peer,
            ticket=ticket,
            destinations=sorted(destinations, key=lambda pair: pair[0].block),
            notify=notify,
            started_s=now,
            deadline_s=now + timeout_s,
            settle=lambda outcome: _call_soon(loop, lambda: _settle(settled, outcome)),
        )
        self._outstanding += 1
        self._thread.submit(read)
        try:
            outcome = await self._until_settled(read, settled)
        finally:
            self._outstanding -= 1
        if isinstance(outcome, WeirError):
            raise outcome
        return outcome

    async def notifications(self) -> AsyncIterator[Completion]:
        assert not self._consumed, "notifications have one consumer"
        self._consumed = True
        self._loop = asyncio.get_running_loop()
        self._watch()
        try:
            while not self._closed:
                done = await self._completions.get()
                if done is None:
                    return
                yield done
        finally:
            self._consumed = False
            self._watch()

    def expect_completions(self, expected: bool) -> None:
        self._expected = expected
        self._watch()

    def outstanding(self) -> int:
        return self._outstanding

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await asyncio.to_thread(self._thread.stop)
        self._deliver(None)

    def _check_open(self) -> None:
        if self._closed:
            raise TransferUnavailable("the KV transfer is closed")

    def _watch(self) -> None:
        self._thread.watch(self._consumed and self._expected and not self._closed)

    async def _probe(self, peer: PeerDescriptor) -> WeirError | None:
        loop = asyncio.get_running_loop()
        settled: asyncio.Future[WeirError | None] = loop.create_future()
        deadline_s = self._clock.monotonic_s() + CONNECT_TIMEOUT_S
        self._thread.connect(
            Probe(peer, deadline_s, lambda failure: _call_soon(loop, lambda: _settle(settled, failure)))
        )
        return await settled

    async def _drop(self, worker: WorkerKey) -> None:
        loop = asyncio.get_running_loop()
        dropped: asyncio.Future[None] = loop.create_future()
        self._thread.drop_peer(worker, lambda: _call_soon(loop, lambda: _settle(dropped, None)))
        await dropped

    async def _until_settled(self, read: Read, settled: "asyncio.Future[Outcome]") -> Outcome:
        """Wait until no byte of ``read`` can land; only then pass on a cancellation that came meanwhile."""
        while not settled.done():
            try:
                await asyncio.wait([settled])
            except asyncio.CancelledError:
                self._thread.cancel(read)
        if read.cancelled:
            raise asyncio.CancelledError
        return settled.result()

    def _completed(self, done: Completion) -> None:
        """Called on the thread."""
        assert self._loop is not None
        _call_soon(self._loop, lambda: self._deliver(done))

    def _deliver(self, done: Completion | None) -> None:
        if self._completions.full():
            # The oldest goes: its lease ends by its deadline. The end mark must get through.
            log.warning("%d completions wait unread; one is dropped", MAX_COMPLETIONS)
            self._completions.get_nowait()
        self._completions.put_nowait(done)


def _settle(future: "asyncio.Future[_T]", value: _T) -> None:
    if not future.done():
        future.set_result(value)


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        pass  # the loop is closed: nobody waits any more
