"""The KV reads of one sequence on the decode side, without any I/O.

    tickets ──► offered ──► in flight ──► proven          by index of the block in the sequence
                   ▲            │ void
                   └── re-sent ─┴─► Void to the router; waits for the tickets to be sent again

Blocks found in the own prefix cache are never read. Tickets that wait while a read is under way are merged
into the next read, so reading keeps up with prefill chunk by chunk. What was proven stays proven: it holds the
KV of these tokens, whatever becomes of the lease it was read under. Nothing else ever counts as arrived.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from weir.errors import KvReadVoid
from weir.ids import RequestKey
from weir.transfer.fingerprint import Fingerprint
from weir.transfer.ticket import (
    BlockRef,
    PeerDescriptor,
    Ticket,
    VoidReason,
    check_seal,
    check_ticket,
    context_digest,
)

MAX_READS_PER_SEQUENCE = 2


@dataclass(frozen=True, slots=True)
class ReadTimings:
    """Sums over the reads of a sequence; seconds. ``exposed_s``: from the end of prefill to the last proof."""

    bytes: int = 0
    descriptors: int = 0
    reads: int = 0
    transport: str = ""
    busy_s: float = 0.0
    exposed_s: float = 0.0
    guard_s: float = 0.0
    checksum_s: float = 0.0
    void_reads: int = 0


@dataclass(frozen=True, slots=True)
class ReadResult:
    """What one proven read cost."""

    bytes: int
    descriptors: int
    transport: str
    guard_s: float
    checksum_s: float


@dataclass(frozen=True, slots=True)
class StartRead:
    """Read ``destinations``, blocks of ``ticket``, into own blocks. ``notify`` tells the owner when proven."""

    read_id: int
    ticket: Ticket
    destinations: tuple[tuple[BlockRef, int], ...]
    notify: bool


@dataclass(frozen=True, slots=True)
class KvProven:
    """KV of the first ``num_tokens`` context tokens is here and proven; no read lands there any more."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class KvComplete:
    """All KV is proven. ``notified``: the owner of the lease has been told by the read itself."""

    lease_id: int
    notified: bool
    timings: ReadTimings


@dataclass(frozen=True, slots=True)
class LeaseUnneeded:
    """A lease whose KV this sequence does not need any more: everything was here already."""

    lease_id: int


@dataclass(frozen=True, slots=True)
class Void:
    """What was offered may not be used; the sequence waits for its tickets to be sent again, or for a cancel."""

    lease_id: int
    reason: str
    detail: str
    timings: ReadTimings


@dataclass(frozen=True, slots=True)
class Refused:
    """A ticket that changes nothing: stale, or for a sequence that is complete. Only counted."""

    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class ReadsDone:
    """No read into the sequence's blocks is under way, and none will begin."""


Action = StartRead | KvProven | KvComplete | LeaseUnneeded | Void | Refused | ReadsDone


class SequenceReads:
    """State machine of one sequence's reads; every method returns what is to be done now, in order.

    ``context``: the tokens whose KV it needs; a ticket that was issued for others is void.

    Times are seconds; ``now_s`` on any monotonic clock, ``now_unix_s`` since 1970.
    """

    def __init__(
        self,
        key: RequestKey,
        peer: PeerDescriptor,
        ours: Fingerprint,
        context: Sequence[int],
        max_reads: int = MAX_READS_PER_SEQUENCE,
    ) -> None:
        context_len = len(context)
        assert context_len >= 1, context_len
        self.key = key
        self.peer = peer
        self.complete = False
        self.closed = False
        self._ours = ours
        self._size = ours.block_size
        self._context_len = context_len
        self._context = context_digest(context)
        self._num_blocks = -(-context_len // ours.block_size)
        self._max_reads = max_reads
        self._table: Sequence[int] = ()
        self._lacking: set[int] = set()
        self._offered: dict[int, BlockRef] = {}
        self._in_flight: dict[int, tuple[int, frozenset[int]]] = {}
        self._last: Ticket | None = None
        self._deadline_unix_s = 0.0
        self._final = False
        self._awaiting_resend = False
        self._next_read = 1
        self._notified = False
        self._timings = ReadTimings()
        self._busy_since: float | None = None
        self._prefill_end_s: float | None = None
        self._proven_told = 0

    @property
    def started(self) -> bool:
        """Whether the own blocks are known."""
        return bool(self._table)

    @property
    def outstanding(self) -> int:
        """Reads under way."""
        return len(self._in_flight)

    @property
    def lease_id(self) -> int:
        """The lease last offered, or 0."""
        return self._last.lease_id if self._last is not None else 0

    # -- inputs -----------------------------------------------------------------------------------------

    def blocks_known(self, cached_tokens: int, table: Sequence[int], now_s: float) -> list[Action]:
        """The engine gave the sequence its blocks; the first ``cached_tokens`` tokens are here already."""
        assert not self.started, self.key
        assert len(table) >= self._num_blocks, (len(table), self._num_blocks)
        assert cached_tokens % self._size == 0 or cached_tokens == self._context_len, cached_tokens
        self._table = table
        if self.closed:
            return [ReadsDone()]
        self._lacking = set(range(-(-cached_tokens // self._size), self._num_blocks))
        return self._advance(now_s)

    def offer(self, ticket: Ticket, now_unix_s: float, now_s: float) -> list[Action]:
        """A ticket came. Refused or void tickets never cause a read."""
        if self.closed:
            return []
        try:
            self._check(ticket, now_unix_s)
        except KvReadVoid as void:
            if self.complete:
                return [Refused(void.reason, void.detail)]
            return self._void(ticket.lease_id, void)
        if self.complete:
            return self._offer_complete(ticket)
        if ticket.lease_id < self.lease_id:
            return [Refused(VoidReason.LEASE_EXPIRED.value, f"lease {ticket.lease_id} was replaced by a newer one")]
        self._take(ticket)
        if self._final:
            self.prefill_ended(now_s)
        return self._advance(now_s)

    def malformed(self, void: KvReadVoid) -> list[Action]:
        """A ticket came whose shape is nonsense."""
        if self.closed:
            return []
        if self.complete:
            return [Refused(void.reason, void.detail)]
        return self._void(self.lease_id, void)

    def prefill_ended(self, now_s: float) -> None:
        """The first token is known: what is read from now on is not hidden behind the prefill."""
        if self._prefill_end_s is None:
            self._prefill_end_s = now_s

    def read_proven(self, read_id: int, result: ReadResult, now_s: float) -> list[Action]:
        """The read ended well: its destinations hold what was promised."""
        _, indices = self._land(read_id, now_s)
        before = self._timings
        self._timings = replace(
            before,
            bytes=before.bytes + result.bytes,
            descriptors=before.descriptors + result.descriptors,
            reads=before.reads + 1,
            transport=result.transport,
            guard_s=before.guard_s + result.guard_s,
            checksum_s=before.checksum_s + result.checksum_s,
        )
        self._lacking -= indices
        return self._advance(now_s)

    def read_void(self, read_id: int, void: KvReadVoid, now_s: float) -> list[Action]:
        """The read may not be used; no byte of it lands any more."""
        lease_id, _ = self._land(read_id, now_s)
        self._notified = False
        self._timings = replace(self._timings, void_reads=self._timings.void_reads + 1)
        if self.closed:
            return self._advance(now_s)
        if lease_id != self.lease_id:
            # Its lease was replaced while it ran; the new one's tickets cover these blocks again.
            return [Refused(void.reason, void.detail), *self._advance(now_s)]
        return self._void(lease_id, void)

    def close(self) -> list[Action]:
        """The sequence is over or needs no KV from elsewhere: begin no read any more."""
        if self.closed:
            return []
        self.closed = True
        self._offered.clear()
        return self._done()

    # -- inside -----------------------------------------------------------------------------------------

    def _check(self, ticket: Ticket, now_unix_s: float) -> None:
        check_ticket(ticket, self.peer, ours=self._ours, now_unix_s=now_unix_s)
        if ticket.key != self.key:
            raise KvReadVoid(VoidReason.MALFORMED.value, f"ticket of request {ticket.key}, sequence {self.key}")
        if ticket.num_tokens > self._context_len:
            detail = f"{ticket.num_tokens} tokens announced, the sequence has {self._context_len}"
            raise KvReadVoid(VoidReason.MALFORMED.value, detail)
        whole = ticket.num_tokens == self._context_len
        if ticket.final and not whole:
            detail = f"the last ticket ends at token {ticket.num_tokens} of {self._context_len}"
            raise KvReadVoid(VoidReason.MALFORMED.value, detail)
        if not whole and ticket.num_tokens % self._size:
            raise KvReadVoid(VoidReason.MALFORMED.value, "a block is announced that is neither full nor the last")
        check_seal(ticket, self._context)

    def _offer_complete(self, ticket: Ticket) -> list[Action]:
        if self._last is None and self._timings.reads == 0:
            # Everything was found here before any ticket came: the lease was not needed.
            if not ticket.final:
                return []
            self._last = ticket
            return [LeaseUnneeded(ticket.lease_id)]
        detail = f"lease {ticket.lease_id}: the sequence's KV is complete"
        return [Refused(VoidReason.ALREADY_USED.value, detail)]

    def _take(self, ticket: Ticket) -> None:
        if ticket.lease_id != self.lease_id:
            self._offered.clear()
            self._final = False
            self._deadline_unix_s = 0.0
        self._last = ticket
        self._deadline_unix_s = max(self._deadline_unix_s, ticket.deadline_unix_s)
        for offset, ref in enumerate(ticket.blocks):
            self._offered[ticket.first_block + offset] = ref
        self._final = self._final or ticket.final

    def _reading(self) -> set[int]:
        return {index for _, indices in self._in_flight.values() for index in indices}

    def _advance(self, now_s: float) -> list[Action]:
        """Tell what is proven, finish, or start what can be read now."""
        if self.closed or self.complete:
            return self._done()
        if not self.started:
            return []
        actions = self._tell_proven()
        if not self._lacking:
            return [*actions, *self._finish(now_s)]
        needed = self._lacking - self._reading()
        gap = min(needed - self._offered.keys(), default=None)
        if self._awaiting_resend:
            # Late tickets of before the void must not restart it: it begins again with its first block, and a
            # hole before the last block can only be filled by what is still to be sent again.
            if not needed or min(needed) not in self._offered or (self._final and gap is not None):
                return actions
            self._awaiting_resend = False
        elif self._final and gap is not None:
            detail = f"the last ticket came, but block {gap} was never announced"
            return [*actions, *self._void(self.lease_id, KvReadVoid(VoidReason.MALFORMED.value, detail))]
        if read := self._next(needed):
            self._busy_since = now_s if self._busy_since is None else self._busy_since
            actions.append(read)
        return actions

    def _tell_proven(self) -> list[Action]:
        first_lacking = min(self._lacking, default=self._num_blocks)
        num_tokens = min(first_lacking * self._size, self._context_len)
        if num_tokens <= self._proven_told or self._timings.reads == 0:
            return []
        self._proven_told = num_tokens
        return [KvProven(num_tokens)]

    def _next(self, needed: set[int]) -> StartRead | None:
        if len(self._in_flight) >= self._max_reads or self._last is None:
            return None
        wanted = self._readable(needed)
        if not wanted:
            return None
        read_id, self._next_read = self._next_read, self._next_read + 1
        self._in_flight[read_id] = (self._last.lease_id, frozenset(wanted))
        self._notified = self._final and self._lacking == set(wanted)
        destinations = tuple((self._offered[index], self._table[index]) for index in wanted)
        return StartRead(read_id, self._merged(wanted), destinations, self._notified)

    def _readable(self, needed: set[int]) -> list[int]:
        """What one ticket can cover: needed blocks from the first offered one on, up to the first not offered."""
        wanted: list[int] = []
        for index in sorted(needed & self._offered.keys()):
            if wanted and any(between not in self._offered for between in range(wanted[-1] + 1, index)):
                break
            wanted.append(index)
        return wanted

    def _merged(self, wanted: Sequence[int]) -> Ticket:
        """One ticket for blocks that were announced by several."""
        assert self._last is not None
        first, end = wanted[0], wanted[-1] + 1
        return replace(
            self._last,
            first_block=first,
            blocks=tuple(self._offered[index] for index in range(first, end)),
            num_tokens=min(end * self._size, self._context_len),
            final=self._final and end == self._num_blocks,
            deadline_unix_s=self._deadline_unix_s,
        )

    def _land(self, read_id: int, now_s: float) -> tuple[int, frozenset[int]]:
        lease_id, indices = self._in_flight.pop(read_id)
        if not self._in_flight and self._busy_since is not None:
            self._timings = replace(self._timings, busy_s=self._timings.busy_s + now_s - self._busy_since)
            self._busy_since = None
        return lease_id, indices

    def _void(self, lease_id: int, void: KvReadVoid) -> list[Action]:
        already = self._awaiting_resend
        self._offered.clear()
        self._final = False
        self._awaiting_resend = True
        if already:
            return [Refused(void.reason, void.detail)]
        return [Void(lease_id, void.reason, void.detail, self._timings)]

    def _finish(self, now_s: float) -> list[Action]:
        self.complete = True
        self._offered.clear()
        exposed = now_s - self._prefill_end_s if self._prefill_end_s is not None and self._timings.reads else 0.0
        self._timings = replace(self._timings, exposed_s=exposed)
        return [KvComplete(self.lease_id, self._notified, self._timings), *self._done()]

    def _done(self) -> list[Action]:
        return [ReadsDone()] if self.started and not self._in_flight else []
