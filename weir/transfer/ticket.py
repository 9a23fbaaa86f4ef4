"""The ticket of a hand-over, the peer it is read from, and the proof that a read gave what was promised.

P issues a ticket, the router carries it, D reads by it. A ticket promises contents by *generation*: the guard
table beside P's pool holds each block's generation and checksum, and D reads the guard after the data. If any
generation differs from the ticket's, or the checksum from the data's, the read is void (a seqlock).
"""

from __future__ import annotations

import enum
import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

from weir.errors import KvReadVoid
from weir.ids import RequestKey, WorkerKey
from weir.transfer.fingerprint import Fingerprint

MAX_TICKET_BLOCKS = 1 << 16


class VoidReason(enum.Enum):
    """Why a read may not be used; the label of ``weir_kv_reads_void_total``."""

    WRONG_WORKER = "wrong_worker"
    WRONG_INCARNATION = "wrong_incarnation"
    FINGERPRINT = "fingerprint"
    LEASE_EXPIRED = "lease_expired"
    OUT_OF_RANGE = "out_of_range"
    MALFORMED = "malformed"
    ALTERED = "altered"
    GENERATION = "generation"
    CHECKSUM = "checksum"
    ALREADY_USED = "already_used"
    TRANSPORT = "transport"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class PeerDescriptor:
    """What a reader must know of a worker's memory; changes only with its incarnation.

    ``pool_base``, ``guard_base`` addresses in the owner's address space; ``device_id`` 0 on CPU.
    ``memory`` is NIXL's memory type of the pool: ``DRAM`` or ``VRAM``. ``agent_metadata`` is opaque.
    """

    worker: WorkerKey
    fingerprint: Fingerprint
    agent_metadata: bytes
    memory: str
    device_id: int
    pool_base: int
    block_bytes: int
    num_blocks: int
    guard_base: int
    host_id: str = ""


@dataclass(frozen=True, slots=True)
class BlockRef:
    """A block of the source worker and the generation its contents were promised under."""

    block: int
    generation: int


@dataclass(frozen=True, slots=True)
class Ticket:
    """KV of a prompt's first ``num_tokens`` tokens, in ``blocks`` order; the last may be partly filled.

    Tickets of one lease grow while prefill goes on: the same blocks, then more. ``first_block`` is the index in
    the sequence of ``blocks[0]``. ``final`` marks the ticket after which nothing more comes.
    ``deadline_unix_s`` is when the lease ends by itself. ``seal`` binds all of it to the tokens whose KV it is:
    generations alone would let one block pass for another whose turn it is as often.
    """

    key: RequestKey
    lease_id: int
    source: WorkerKey
    fingerprint_digest: bytes
    first_block: int
    blocks: tuple[BlockRef, ...]
    num_tokens: int
    final: bool
    deadline_unix_s: float
    seal: bytes = b""


@dataclass(frozen=True, slots=True)
class GuardEntry:
    """A row of the guard table as read: little-endian u64 pair. Checksum 0 means: not sealed."""

    generation: int
    checksum: int


GUARD_ENTRY_BYTES = 16


def context_digest(tokens: Sequence[int]) -> bytes:
    """What ``tokens`` are, in 16 bytes; equal in every process."""
    return hashlib.blake2b(struct.pack(f"<{len(tokens)}q", *tokens), digest_size=16).digest()


def sealed(ticket: Ticket, context: bytes) -> Ticket:
    """``ticket`` with its seal; ``context`` is the digest of all tokens of the sequence that P computes."""
    return replace(ticket, seal=_seal_of(ticket, context))


def check_seal(ticket: Ticket, context: bytes) -> None:
    """Raise KvReadVoid unless ``ticket`` is as it was issued, and for the tokens with the digest ``context``.

    No secret is in it: it tells a ticket that was altered or mixed up from one that was not. Who may speak to a
    worker at all is the transport's matter.
    """
    if ticket.seal != _seal_of(ticket, context):
        raise KvReadVoid(VoidReason.ALTERED.value, f"ticket of {ticket.key} is not as {ticket.source} issued it")


def _seal_of(ticket: Ticket, context: bytes) -> bytes:
    names = f"{ticket.key.request_id}\0{ticket.source.worker_id}".encode()
    numbers = struct.pack(
        "<8Qd?",
        len(names),
        ticket.key.attempt,
        ticket.lease_id,
        ticket.source.incarnation,
        ticket.first_block,
        ticket.num_tokens,
        len(ticket.blocks),
        len(ticket.fingerprint_digest),
        ticket.deadline_unix_s,
        ticket.final,
    )
    blocks = struct.pack(
        f"<{2 * len(ticket.blocks)}Q", *(n for ref in ticket.blocks for n in (ref.block, ref.generation))
    )
    return hashlib.blake2b(
        b"".join((context, numbers, names, ticket.fingerprint_digest, blocks)), digest_size=16
    ).digest()


def check_ticket(ticket: Ticket, peer: PeerDescriptor, *, ours: Fingerprint, now_unix_s: float) -> None:
    """What can be refused before reading a byte. Raises KvReadVoid with the reason."""
    if ticket.source.worker_id != peer.worker.worker_id:
        raise KvReadVoid(VoidReason.WRONG_WORKER.value, f"ticket of {ticket.source}, peer {peer.worker}")
    if ticket.source.incarnation != peer.worker.incarnation:
        raise KvReadVoid(VoidReason.WRONG_INCARNATION.value, f"ticket of {ticket.source}, peer {peer.worker}")
    if ticket.fingerprint_digest != ours.digest():
        raise KvReadVoid(VoidReason.FINGERPRINT.value, "ticket was issued for another model or layout")
    if now_unix_s > ticket.deadline_unix_s:
        late_s = now_unix_s - ticket.deadline_unix_s
        raise KvReadVoid(VoidReason.LEASE_EXPIRED.value, f"lease ended {late_s:.3f} s ago")
    _check_blocks(ticket, peer, ours.block_size)


def _check_blocks(ticket: Ticket, peer: PeerDescriptor, block_size: int) -> None:
    if not 0 < len(ticket.blocks) <= MAX_TICKET_BLOCKS or ticket.first_block < 0:
        raise KvReadVoid(VoidReason.MALFORMED.value, f"{len(ticket.blocks)} blocks from {ticket.first_block}")
    needed = -(-ticket.num_tokens // block_size)
    if ticket.num_tokens < 1 or needed != ticket.first_block + len(ticket.blocks):
        raise KvReadVoid(VoidReason.MALFORMED.value, f"{ticket.num_tokens} tokens need {needed} blocks")
    if len({ref.block for ref in ticket.blocks}) != len(ticket.blocks):
        raise KvReadVoid(VoidReason.MALFORMED.value, "a block is listed twice")
    for ref in ticket.blocks:
        if not 0 <= ref.block < peer.num_blocks:
            raise KvReadVoid(VoidReason.OUT_OF_RANGE.value, f"block {ref.block} of {peer.num_blocks}")


def prove(refs: Sequence[BlockRef], guards: Sequence[GuardEntry], checksums: Sequence[int] | None) -> None:
    """Check guard entries, read *after* the data, against the promise; raise KvReadVoid on any difference.

    ``checksums`` are those of the bytes as they arrived, in the same order, or None when switched off.
    """
    assert len(refs) == len(guards)
    for ref, guard in zip(refs, guards, strict=True):
        if guard.generation != ref.generation:
            raise KvReadVoid(
                VoidReason.GENERATION.value,
                f"block {ref.block}: promised generation {ref.generation}, found {guard.generation}",
            )
    if checksums is None:
        return
    for ref, guard, found in zip(refs, guards, checksums, strict=True):
        if guard.checksum != found:
            raise KvReadVoid(VoidReason.CHECKSUM.value, f"block {ref.block}: bytes differ from what was sealed")
