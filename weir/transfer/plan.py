"""What a KV read does and promises, whatever carries it: the seam, its values, the planning of a read."""

from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from weir.errors import KvReadVoid, TransferUnavailable
from weir.ids import RequestKey, WorkerId, WorkerKey
from weir.transfer.fingerprint import Fingerprint, check_compatible
from weir.transfer.ticket import BlockRef, PeerDescriptor, Ticket, VoidReason, check_ticket

MAX_DESCRIPTOR_BYTES = 16 << 20
MAX_RETIRED = 1024

Destination = tuple[BlockRef, int]
"""A block of the ticket and the own block that its bytes go to."""


@dataclass(frozen=True, slots=True)
class Run:
    """``count`` adjacent blocks, from ``src`` at the owner to ``dst`` here: one transfer descriptor."""

    src: int
    dst: int
    count: int


@dataclass(frozen=True, slots=True)
class ReadReport:
    """How a proven read went. Times in seconds; ``total_s`` is from the call to the end of the proof.

    ``descriptors`` counts the data's only. ``post_s`` is the part of ``data_s`` in which the transport blocked
    its caller. ``transport`` is what was found to carry it: ``ucx:cma``, ``ucx:tcp``, ``ucx (unresolved)``,
    ``local``.
    """

    bytes: int
    blocks: int
    descriptors: int
    transport: str
    post_s: float
    data_s: float
    guard_s: float
    checksum_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Completion:
    """A reader's word that its last read under ``lease_id`` was proven; end the lease for ``key`` only."""

    lease_id: int
    key: RequestKey


class KvTransfer(Protocol):
    """Reads other workers' KV into this worker's pool and lets others read from it. All calls on one loop."""

    def descriptor(self) -> PeerDescriptor:
        """What others need to read from here; constant for the process's lifetime."""
        ...

    async def connect(self, peer: PeerDescriptor) -> None:
        """Get ready to read from ``peer``; idempotent. A new incarnation replaces the one known before.

        Raises FingerprintMismatch, and TransferUnavailable if the peer's metadata cannot be used or the
        incarnation was replaced before.
        """
        ...

    async def disconnect(self, worker: WorkerKey) -> None:
        """Drop all that is held for ``worker``; its reads under way end void. Harmless if unknown."""
        ...

    async def read(
        self, ticket: Ticket, destinations: Sequence[Destination], *, timeout_s: float, notify: bool
    ) -> ReadReport:
        """Copy the blocks of ``ticket`` named in ``destinations`` into own blocks, and prove them.

        The data is read first, then the guard, then the proof. On return the destinations hold exactly what
        the ticket promised. ``notify`` tells the owner, after the proof, that the lease may end.

        However this ends, by return, KvReadVoid, TransferUnavailable, ResourceExhausted or CancelledError, no
        byte can land in the destinations afterwards. Hence cancelling the caller does not end it at once:
        CancelledError comes when the transport is done with the memory, within ``timeout_s`` and the time
        to reset the transport. Keep the destinations quarantined until it ends.
        """
        ...

    def notifications(self) -> AsyncIterator[Completion]:
        """Completions that readers sent here, each once, as they come; ends when the transfer is closed.

        They may be lost: a lease also ends by its deadline. At most one consumer.
        """
        ...

    def expect_completions(self, expected: bool) -> None:
        """Whether any lease is open here. While none is, nothing is polled for."""
        ...

    def outstanding(self) -> int:
        """Reads that have begun and not ended."""
        ...

    async def close(self) -> None:
        """End all reads (void) and give back what the transport holds. Idempotent."""
        ...


def merge_runs(
    pairs: Sequence[tuple[int, int]], *, block_bytes: int, max_descriptor_bytes: int = MAX_DESCRIPTOR_BYTES
) -> list[Run]:
    """Fewest runs of blocks adjacent on both sides that cover ``pairs`` (source, destination).

    Sorted by source; no run is longer than ``max_descriptor_bytes``, or one block where a block is longer.
    """
    longest = max(1, max_descriptor_bytes // block_bytes)
    runs: list[Run] = []
    first_src = first_dst = count = 0
    for src, dst in sorted(pairs):
        if count and src == first_src + count and dst == first_dst + count and count < longest:
            count += 1
            continue
        if count:
            runs.append(Run(first_src, first_dst, count))
        first_src, first_dst, count = src, dst, 1
    if count:
        runs.append(Run(first_src, first_dst, count))
    return runs


def segments(runs: Sequence[Run], *, block_bytes: int, max_segment_bytes: int) -> list[list[Run]]:
    """``runs`` in order, in groups of at most ``max_segment_bytes`` (one run at least) that are posted apart."""
    groups: list[list[Run]] = []
    room = 0
    for run in runs:
        size = run.count * block_bytes
        if not groups or size > room:
            groups.append([])
            room = max_segment_bytes
        groups[-1].append(run)
        room -= size
    return groups


def delta(ticket: Ticket, blocks_held: int) -> tuple[BlockRef, ...]:
    """The ticket's blocks that a reader lacks who holds the sequence's first ``blocks_held`` blocks."""
    assert blocks_held >= 0, blocks_held
    return ticket.blocks[max(0, blocks_held - ticket.first_block) :]


def check_read(
    ticket: Ticket,
    destinations: Sequence[Destination],
    peer: PeerDescriptor,
    ours: Fingerprint,
    now_unix_s: float,
    num_own_blocks: int,
) -> None:
    """All that can be refused before a byte is read: KvReadVoid for the ticket, assertions for the caller."""
    check_ticket(ticket, peer, ours=ours, now_unix_s=now_unix_s)
    assert destinations, "nothing to read"
    own = [block for _, block in destinations]
    assert len(set(own)) == len(own), "a destination is listed twice"
    assert all(0 <= block < num_own_blocks for block in own), f"destination outside {num_own_blocks} blocks"
    sources = {ref for ref, _ in destinations}
    assert sources <= set(ticket.blocks), "a source is not in the ticket"
    assert len(sources) == len(own), "a source is listed twice"


def encode_completion(done: Completion) -> bytes:
    """The notification's payload; at most some hundred bytes."""
    return f"weir1 {done.lease_id} {done.key.attempt} {done.key.request_id}".encode()


def decode_completion(payload: bytes) -> Completion | None:
    """The completion in ``payload``, or None if it is not one: it comes from outside."""
    try:
        version, lease_id, attempt, request_id = payload.decode().split(" ", 3)
        if version != "weir1" or not request_id:
            return None
        return Completion(int(lease_id), RequestKey(request_id, int(attempt)))
    except ValueError:
        return None


class PeerTable:
    """The peers known to a reader: one incarnation of each worker, never back to a replaced one."""

    def __init__(self, ours: Fingerprint) -> None:
        self._ours = ours
        self._peers: dict[WorkerId, PeerDescriptor] = {}
        self._retired: OrderedDict[WorkerKey, None] = OrderedDict()

    def admit(self, peer: PeerDescriptor) -> PeerDescriptor | None:
        """Check ``peer`` and note it; returns the incarnation it replaces, or None.

        Raises FingerprintMismatch, or TransferUnavailable for an incarnation that was replaced before.
        """
        check_compatible(self._ours, peer.fingerprint)
        if peer.worker in self._retired:
            raise TransferUnavailable(f"worker {peer.worker} was replaced by a newer incarnation")
        known = self._peers.get(peer.worker.worker_id)
        self._peers[peer.worker.worker_id] = peer
        if known is None or known.worker == peer.worker:
            return None
        self._retired[known.worker] = None
        if len(self._retired) > MAX_RETIRED:
            self._retired.popitem(last=False)
        return known

    def drop(self, worker: WorkerKey) -> PeerDescriptor | None:
        """Forget ``worker`` if it is the incarnation known; returns it."""
        known = self._peers.get(worker.worker_id)
        if known is None or known.worker != worker:
            return None
        return self._peers.pop(worker.worker_id)

    def knows(self, worker: WorkerKey) -> bool:
        """Whether ``worker``, in this incarnation, is connected."""
        known = self._peers.get(worker.worker_id)
        return known is not None and known.worker == worker

    def source_of(self, ticket: Ticket) -> PeerDescriptor:
        """The peer to read ``ticket`` from, whatever its incarnation.

        Raises KvReadVoid(transport) when the worker is not connected.
        """
        known = self._peers.get(ticket.source.worker_id)
        if known is None:
            raise KvReadVoid(VoidReason.TRANSPORT.value, f"worker {ticket.source} is not connected")
        return known

    def all(self) -> list[PeerDescriptor]:
        """Every connected peer."""
        return list(self._peers.values())
