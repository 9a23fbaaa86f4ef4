"""The in-memory twin of ``NixlTransfer``: several workers' pools in one process, same checks, same proof.

The fabric can delay, tear, corrupt and fail reads, for tests and simulation. Delays go through asyncio's timers,
so that a virtual-time loop runs them without waiting.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from weir.clock import Clock
from weir.errors import FingerprintMismatch, KvReadVoid, ResourceExhausted, TransferUnavailable
from weir.ids import WorkerKey
from weir.kvcache.pool import KvPool
from weir.transfer.fingerprint import Fingerprint
from weir.transfer.plan import (
    MAX_DESCRIPTOR_BYTES,
    Completion,
    Destination,
    PeerTable,
    ReadReport,
    Run,
    check_read,
    merge_runs,
)
from weir.transfer.ticket import PeerDescriptor, Ticket, VoidReason, prove

MAX_OUTSTANDING = 256
MAX_COMPLETIONS = 4096


def _no_delay(ticket: Ticket) -> float:
    return 0.0


def _nothing(ticket: Ticket) -> None:
    return None


def _deliver(done: Completion) -> bool:
    return True


@dataclass(slots=True)
class Faults:
    """What the fabric does to reads; replace any. Each may raise KvReadVoid to fail the read.

    ``before_data_s``, ``per_run_s``, ``before_guard_s``: seconds that a read takes before its data, between
    two runs of it, and before its guard. ``on_data``: called after the data has landed, before the guard is
    read: the place to tear a read or flip its bytes. ``notification``: whether a completion is delivered.
    """

    before_data_s: Callable[[Ticket], float] = _no_delay
    per_run_s: Callable[[Ticket], float] = _no_delay
    before_guard_s: Callable[[Ticket], float] = _no_delay
    on_data: Callable[[Ticket], None] = _nothing
    notification: Callable[[Completion], bool] = _deliver


@dataclass(slots=True)
class LocalFabric:
    """What connects the transfers of one process. ``kill`` is the sudden end of a worker."""

    faults: Faults = field(default_factory=Faults)
    _alive: dict[WorkerKey, "LocalTransfer"] = field(default_factory=dict)

    def attach(self, transfer: "LocalTransfer") -> None:
        """Make ``transfer`` reachable under its worker's key."""
        self._alive[transfer.worker] = transfer

    def kill(self, worker: WorkerKey) -> None:
        """Make ``worker`` unreachable: reads from it end void, at once or at their next step."""
        self._alive.pop(worker, None)

    def owner(self, worker: WorkerKey) -> "LocalTransfer":
        """The transfer of ``worker``; raises KvReadVoid(transport) when it is not there."""
        transfer = self._alive.get(worker)
        if transfer is None:
            raise KvReadVoid(VoidReason.TRANSPORT.value, f"{worker} is not reachable")
        return transfer


class LocalTransfer:
    """``KvTransfer`` over a ``LocalFabric``. CPU pools only."""

    def __init__(
        self,
        fabric: LocalFabric,
        pool: KvPool,
        worker: WorkerKey,
        fingerprint: Fingerprint,
        *,
        clock: Clock,
        host_id: str = "local",
        max_descriptor_bytes: int = MAX_DESCRIPTOR_BYTES,
        max_outstanding: int = MAX_OUTSTANDING,
    ) -> None:
        self.worker = worker
        self.pool = pool
        self._fabric = fabric
        self._fingerprint = fingerprint
        self._clock = clock
        self._host_id = host_id
        self._max_descriptor_bytes = max_descriptor_bytes
        self._max_outstanding = max_outstanding
        self._peers = PeerTable(fingerprint)
        self._reads: dict[asyncio.Task[ReadReport], WorkerKey] = {}
        self._completions: asyncio.Queue[Completion | None] = asyncio.Queue(MAX_COMPLETIONS)
        self._closed = False
        fabric.attach(self)

    def descriptor(self) -> PeerDescriptor:
        return PeerDescriptor(
            worker=self.worker,
            fingerprint=self._fingerprint,
            agent_metadata=str(self.worker).encode(),
            memory="DRAM",
            device_id=0,
            pool_base=self.pool.base,
            block_bytes=self.pool.layout.block_bytes,
            num_blocks=self.pool.num_blocks,
            guard_base=self.pool.guard.base,
            host_id=self._host_id,
        )

    async def connect(self, peer: PeerDescriptor) -> None:
        self._check_open()
        if peer.block_bytes != self.pool.layout.block_bytes:
            raise FingerprintMismatch("block_bytes", self.pool.layout.block_bytes, peer.block_bytes)
        replaced = self._peers.admit(peer)
        if replaced is not None:
            await self._end_reads_from(replaced.worker)

    async def disconnect(self, worker: WorkerKey) -> None:
        if self._peers.drop(worker) is not None:
            await self._end_reads_from(worker)

    async def read(
        self, ticket: Ticket, destinations: Sequence[Destination], *, timeout_s: float, notify: bool
    ) -> ReadReport:
        self._check_open()
        peer = self._peers.source_of(ticket)
        check_read(ticket, destinations, peer, self._fingerprint, self._clock.unix_s(), self.pool.num_blocks)
        if len(self._reads) >= self._max_outstanding:
            raise ResourceExhausted(f"{len(self._reads)} KV reads are under way, the limit")
        in_order = sorted(destinations, key=lambda pair: pair[0].block)
        task = asyncio.ensure_future(self._read(ticket, in_order, notify))
        self._reads[task] = peer.worker
        try:
            return await self._ended(task, timeout_s)
        finally:
            del self._reads[task]

    async def notifications(self) -> AsyncIterator[Completion]:
        while not self._closed:
            done = await self._completions.get()
            if done is None:
                return
            yield done

    def expect_completions(self, expected: bool) -> None:
        pass  # nothing is polled for

    def outstanding(self) -> int:
        return len(self._reads)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._fabric.kill(self.worker)
        for peer in self._peers.all():
            await self._end_reads_from(peer.worker)
        self._complete(None)

    def _check_open(self) -> None:
        if self._closed:
            raise TransferUnavailable("the KV transfer is closed")

    async def _ended(self, task: "asyncio.Task[ReadReport]", timeout_s: float) -> ReadReport:
        """As NIXL's: cancelling the caller lets the read go on until no byte can land any more."""
        cancelled = False
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        late = False
        while not task.done():
            try:
                await asyncio.wait([task], timeout=max(0.0, deadline_s - loop.time()) if not late else None)
            except asyncio.CancelledError:
                cancelled = True
            if not task.done() and loop.time() >= deadline_s:
                late = True
                task.cancel()
        if cancelled:
            if not task.cancelled():
                task.exception()
            raise asyncio.CancelledError
        if task.cancelled():
            reason = VoidReason.TIMEOUT if late else VoidReason.TRANSPORT
            raise KvReadVoid(reason.value, f"a read from {self._reads[task]} was ended")
        return task.result()

    async def _end_reads_from(self, worker: WorkerKey) -> None:
        ending = [task for task, source in self._reads.items() if source == worker]
        for task in ending:
            task.cancel()
        if ending:
            await asyncio.wait(ending)

    async def _read(self, ticket: Ticket, pairs: Sequence[Destination], notify: bool) -> ReadReport:
        faults = self._fabric.faults
        started_s = self._clock.monotonic_s()
        await _pass(faults.before_data_s(ticket))
        begun_s = self._clock.monotonic_s()
        runs = merge_runs(
            [(ref.block, block) for ref, block in pairs],
            block_bytes=self.pool.layout.block_bytes,
            max_descriptor_bytes=self._max_descriptor_bytes,
        )
        for index, run in enumerate(runs):
            if index:
                await _pass(faults.per_run_s(ticket))
            self._copy(ticket, run)
        faults.on_data(ticket)
        data_s = self._clock.monotonic_s()
        await _pass(faults.before_guard_s(ticket))
        owner = self._fabric.owner(ticket.source)
        guards = owner.pool.guard.entries(ref.block for ref, _ in pairs)
        guard_s = self._clock.monotonic_s()
        own = [block for _, block in pairs]
        checksums = self.pool.checksums(own) if self.pool.checksums_enabled else None
        prove([ref for ref, _ in pairs], guards, checksums)
        proven_s = self._clock.monotonic_s()
        if notify:
            done = Completion(ticket.lease_id, ticket.key)
            if faults.notification(done):
                owner._complete(done)
        return ReadReport(
            bytes=len(own) * self.pool.layout.block_bytes,
            blocks=len(own),
            descriptors=len(runs),
            transport="local",
            post_s=0.0,
            data_s=data_s - begun_s,
            guard_s=guard_s - data_s,
            checksum_s=proven_s - guard_s,
            total_s=proven_s - started_s,
        )

    def _copy(self, ticket: Ticket, run: Run) -> None:
        source = self._fabric.owner(ticket.source).pool
        for index in range(run.count):
            self.pool.block_view(run.dst + index)[:] = source.block_view(run.src + index)

    def _complete(self, done: Completion | None) -> None:
        if self._completions.full():
            self._completions.get_nowait()
        self._completions.put_nowait(done)


async def _pass(seconds: float) -> None:
    if seconds > 0.0:
        await asyncio.sleep(seconds)
