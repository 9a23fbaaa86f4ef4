"""The prefill side of requests, without any I/O: commands and engine events in, news and engine orders out.

    begin ─► (engine: Started Progress* TokensOut Prefilled) ─► the KV waits under its lease ─► the lease ends
                │                                                                               │
                └── cancel | deadline | session lost | role change ──► engine cancels ──► over ◄┘

Ownership: the engine holds the blocks; the desk holds the promise. A lease opens with the first announced
blocks and grows chunk by chunk. It ends once, for whichever reason comes first; then the engine is told to
give the blocks back, and the router hears ``AttemptOver`` exactly once, when nothing of the attempt is left.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from weir.attempts.desk import (
    MAX_ATTEMPTS,
    MAX_NEWS,
    AddRequest,
    Attempt,
    AttemptDesk,
    AttemptOver,
    AttemptStarted,
    CancelRequest,
    ended_by,
)
from weir.engine.output import (
    Event,
    Finished,
    Preempted,
    Prefilled,
    Progress,
    Started,
    TokenLogprobs,
    TokensOut,
    Usage,
)
from weir.engine.request import EngineRequest
from weir.errors import DeadlineExceeded, FailedPrecondition, ResourceExhausted, WeirError
from weir.ids import RequestKey, WorkerKey
from weir.lifecycle import FinishReason
from weir.transfer.lease import LeaseEnd, LeaseTable
from weir.transfer.ticket import BlockRef, Ticket, context_digest, sealed


@dataclass(frozen=True, slots=True)
class TicketIssued:
    """Blocks that may be read now."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class FirstTokenMade:
    """The first token; ``finish`` is set when it also ends the request."""

    key: RequestKey
    index: int
    token: int
    logprobs: TokenLogprobs | None
    finish: FinishReason | None
    prefill_s: float
    usage: Usage


News = AttemptStarted | TicketIssued | FirstTokenMade | AttemptOver


@dataclass(frozen=True, slots=True)
class ReleaseKv:
    """The engine shall give the held KV back; silent."""

    key: RequestKey


Order = AddRequest | CancelRequest | ReleaseKv


@dataclass(slots=True)
class _Attempt(Attempt):
    lease_s: float = 0.0
    deadline_unix_s: float | None = None
    lease_id: int = 0
    holding: bool = False
    token: TokensOut | None = None
    digest: bytes = b""

    def context(self) -> bytes:
        """The digest of its tokens, made when it is first asked for."""
        if not self.digest:
            self.digest = context_digest(self.request.prompt + self.request.generated)
        return self.digest


class PrefillDesk(AttemptDesk[_Attempt, News, Order]):
    """All prefill attempts of one worker process. Single-threaded; every method may add news and orders."""

    def __init__(
        self,
        worker: WorkerKey,
        fingerprint_digest: bytes,
        leases: LeaseTable,
        *,
        block_size: int,
        max_lease_s: float,
        max_attempts: int = MAX_ATTEMPTS,
        max_news: int = MAX_NEWS,
    ) -> None:
        super().__init__(max_attempts=max_attempts, max_news=max_news)
        self.worker = worker
        self.leases = leases
        self.prefills_completed = 0
        self._digest = fingerprint_digest
        self._block_size = block_size
        self._max_lease_s = max_lease_s
        self._by_lease: dict[int, RequestKey] = {}

    # -- looking ----------------------------------------------------------------------------------------

    def context_to_compute(self, key: RequestKey) -> int:
        """Context tokens of an attempt that is prefilled here; 0 for any other."""
        attempt = self._attempts.get(key)
        return attempt.request.context_len if attempt is not None else 0

    def next_deadline(self) -> float | None:
        """When ``expire`` is next worth calling, seconds since 1970, or None."""
        return self.leases.next_deadline()

    # -- commands ---------------------------------------------------------------------------------------

    def end_session(self, session: str) -> None:
        """The router is gone for good: stop its attempts and end its leases."""
        self.drop_news(session)
        for attempt in self._of_session(session):
            over = AttemptOver(attempt.key, "CANCELLED", "the router's session is lost")
            self._close(attempt, over, LeaseEnd.SESSION_LOST)

    def begin(self, session: str, request: EngineRequest, lease_s: float, deadline_unix_s: float | None) -> None:
        """A new prompt. Repeats and attempts older than a known one are ignored; a newer one stops the older.

        ``lease_s``: longest time the KV is kept after the last chunk; bounded by the worker's limit.
        """
        if self._is_old(session, request.key) or self._is_full(session, request.key):
            return
        lease_s = min(lease_s or self._max_lease_s, self._max_lease_s)
        self._enter(_Attempt(request, session, lease_s=lease_s, deadline_unix_s=deadline_unix_s))

    def release(self, key: RequestKey, lease_id: int) -> None:
        """The router needs the lease no longer. Another request's lease is left alone."""
        if self._by_lease.get(lease_id) == key:
            self.lease_read(lease_id)

    def lease_read(self, lease_id: int) -> None:
        """All KV under the lease was read and proven. Harmless if the lease has ended."""
        key = self._by_lease.get(lease_id)
        if key is not None:
            self._close(self._attempts[key], AttemptOver(key, "OK"), LeaseEnd.READ_PROVEN)

    def expire(self, now_unix_s: float) -> None:
        """End the leases whose deadline has passed, and their attempts. (Requests' deadlines are the engine's.)"""
        for lease_id, _ in self.leases.expire(now_unix_s):
            attempt = self._attempts[self._by_lease.pop(lease_id)]
            attempt.lease_id = 0
            over = AttemptOver(attempt.key, "DEADLINE_EXCEEDED", "the lease lapsed before its KV was read")
            self._close(attempt, over, LeaseEnd.DEADLINE)

    def end_waiting(self, message: str) -> None:
        """End what has not begun to run, so that the router sends it elsewhere."""
        for attempt in self._waiting():
            self._close(attempt, AttemptOver(attempt.key, "UNAVAILABLE", message), LeaseEnd.ROLE_CHANGE)

    def end_everything(self, message: str, lease_end: LeaseEnd) -> None:
        """End all attempts (role change, shutdown)."""
        for attempt in self._all():
            self._close(attempt, AttemptOver(attempt.key, "UNAVAILABLE", message), lease_end)

    def engine_lost(self, error: WeirError) -> None:
        """The engine is gone: no event will come any more; all attempts are over."""
        for attempt in self._all():
            self._end_lease(attempt, LeaseEnd.SHUTDOWN)
            self._forget(attempt, ended_by(attempt.key, error))

    # -- engine events ----------------------------------------------------------------------------------

    def refused(self, key: RequestKey, error: WeirError) -> None:
        """The engine did not take the request."""
        attempt = self._attempts.get(key)
        if attempt is not None:
            self._forget(attempt, attempt.closing or ended_by(key, error))

    def on_events(self, events: Iterable[Event], now_unix_s: float) -> None:
        """News of an engine step; events of keys that are not here are left alone."""
        batch = list(events)
        finished = {event.key for event in batch if isinstance(event, Finished)}
        for event in batch:
            attempt = self._attempts.get(event.key)
            if attempt is None:
                continue
            if isinstance(event, Finished):
                self._on_finished(attempt, event)
            elif attempt.closing is None:
                self._on_event(attempt, event, now_unix_s, ends_now=event.key in finished)

    def _on_event(self, attempt: _Attempt, event: Event, now_unix_s: float, *, ends_now: bool) -> None:
        if isinstance(event, Started):
            attempt.started = True
            self._tell(attempt.session, AttemptStarted(event.key, event.cached_tokens, event.queued_s))
        elif isinstance(event, Progress):
            if event.sealed and not ends_now:
                self._announce(attempt, event, now_unix_s)
        elif isinstance(event, TokensOut):
            attempt.token = event
        elif isinstance(event, Prefilled):
            attempt.holding = True
            self.prefills_completed += 1
            self._tell_first_token(attempt, None, event.usage)
        elif isinstance(event, Preempted):
            # What was announced is void; what comes next is announced under a lease of its own.
            attempt.started = False
            self._end_lease(attempt, LeaseEnd.CANCELLED)

    def _announce(self, attempt: _Attempt, event: Progress, now_unix_s: float) -> None:
        deadline = now_unix_s + attempt.lease_s
        if attempt.deadline_unix_s is not None:
            deadline = min(deadline, attempt.deadline_unix_s)
        blocks = [sealed.block for sealed in event.sealed]
        if not attempt.lease_id:
            try:
                attempt.lease_id = self.leases.open(attempt.key, attempt.session, deadline, blocks)
            except (ResourceExhausted, FailedPrecondition) as error:
                self._close(attempt, ended_by(attempt.key, error), LeaseEnd.CANCELLED)
                return
            self._by_lease[attempt.lease_id] = attempt.key
        else:
            alive = self.leases.extend(attempt.lease_id, blocks)
            assert alive, f"lease {attempt.lease_id} ended behind the desk's back"
            self.leases.renew(attempt.lease_id, deadline)
        self._tell(attempt.session, TicketIssued(self._ticket(attempt, event, deadline)))

    def _ticket(self, attempt: _Attempt, event: Progress, deadline_unix_s: float) -> Ticket:
        indices = [sealed.index for sealed in event.sealed]
        assert indices == list(range(indices[0], indices[0] + len(indices))), indices
        # Before the end only full blocks are sealed, while the chunk may stop inside the next one.
        final = event.num_tokens >= attempt.request.context_len
        num_tokens = event.num_tokens if final else (indices[-1] + 1) * self._block_size
        ticket = Ticket(
            key=attempt.key,
            lease_id=attempt.lease_id,
            source=self.worker,
            fingerprint_digest=self._digest,
            first_block=indices[0],
            blocks=tuple(BlockRef(sealed.block, sealed.generation) for sealed in event.sealed),
            num_tokens=num_tokens,
            final=final,
            deadline_unix_s=deadline_unix_s,
        )
        return sealed(ticket, attempt.context())

    def _tell_first_token(self, attempt: _Attempt, finish: FinishReason | None, usage: Usage) -> None:
        made = attempt.token
        if made is None:
            return
        assert len(made.tokens) == 1, made
        logprobs = made.logprobs[0] if made.logprobs else None
        attempt.token = None
        self._tell(
            attempt.session,
            FirstTokenMade(attempt.key, made.first_index, made.tokens[0], logprobs, finish, made.prefill_s, usage),
        )

    def _on_finished(self, attempt: _Attempt, event: Finished) -> None:
        late = isinstance(event.error, DeadlineExceeded)
        self._end_lease(attempt, LeaseEnd.DEADLINE if late else LeaseEnd.CANCELLED)
        if attempt.closing is not None:
            self._forget(attempt, attempt.closing)
        elif event.reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.prefills_completed += 1
            self._tell_first_token(attempt, event.reason, event.usage)
            self._forget(attempt, AttemptOver(attempt.key, "OK"))
        elif event.error is not None:
            self._forget(attempt, ended_by(attempt.key, event.error))
        else:
            self._forget(attempt, AttemptOver(attempt.key, "CANCELLED", "cancelled"))

    # -- inside -----------------------------------------------------------------------------------------

    def _stop(self, attempt: _Attempt, over: AttemptOver) -> None:
        self._close(attempt, over, LeaseEnd.CANCELLED)

    def _close(self, attempt: _Attempt, over: AttemptOver, lease_end: LeaseEnd) -> None:
        """Begin to end it. Held KV is given back at once; running work is stopped and its end awaited."""
        self._end_lease(attempt, lease_end)
        if attempt.closing is not None:
            return
        if attempt.holding:
            self._orders.append(ReleaseKv(attempt.key))
            self._forget(attempt, over)
            return
        attempt.closing = over
        self._orders.append(CancelRequest(attempt.key))

    def _end_lease(self, attempt: _Attempt, reason: LeaseEnd) -> None:
        if attempt.lease_id:
            self.leases.end(attempt.lease_id, reason)
            self._by_lease.pop(attempt.lease_id, None)
            attempt.lease_id = 0

    def _forget(self, attempt: _Attempt, over: AttemptOver) -> None:
        assert attempt.lease_id == 0, attempt
        self._leave(attempt, over)
