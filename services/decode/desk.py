"""The decode side of requests, without any I/O: commands and engine events in, news and orders out.

    begin ─► (engine: Started) ─► reads ─► KV complete ─► (engine: TokensOut* Finished) ─► over
                  tickets ──────────┘           ▲
                  first token ──────────────────┘     LOCAL sequences have no reads

After an attempt is over its reads may still be under way; they are followed until no byte can land, and only
then is the engine told that the blocks are free of them.
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
from weir.engine.output import Event, Finished, Preempted, Progress, Started, TokenLogprobs, TokensOut, Usage
from weir.engine.request import EngineRequest, Mode
from weir.errors import FingerprintMismatch, InvalidArgument, KvReadVoid, ResourceExhausted, WeirError
from weir.ids import RequestKey, WorkerKey
from weir.lifecycle import FinishReason
from weir.services.decode import reads
from weir.services.decode.reads import ReadResult, ReadTimings, SequenceReads, StartRead
from weir.transfer.fingerprint import Fingerprint, check_compatible
from weir.transfer.ticket import PeerDescriptor, Ticket

ENDING_RETRY_S = 0.05


@dataclass(frozen=True, slots=True)
class KvRead:
    """All KV is proven (``reason`` empty), or what was read is void for ``reason``."""

    key: RequestKey
    lease_id: int
    reason: str
    detail: str
    timings: ReadTimings


@dataclass(frozen=True, slots=True)
class NewTokens:
    """Tokens from ``first_index`` on; ``finish`` and ``usage`` come with the last ones (which may be none)."""

    key: RequestKey
    first_index: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    prefill_s: float
    finish: FinishReason | None = None
    usage: Usage | None = None


News = AttemptStarted | KvRead | NewTokens | AttemptOver


@dataclass(frozen=True, slots=True)
class GiveFirstToken:
    """The engine shall continue after ``token``, which was sampled elsewhere."""

    key: RequestKey
    token: int


@dataclass(frozen=True, slots=True)
class KvArrived:
    """KV of the first ``num_tokens`` is proven."""

    key: RequestKey
    num_tokens: int


@dataclass(frozen=True, slots=True)
class ReadsDone:
    """No read lands in the attempt's blocks any more."""

    key: RequestKey


@dataclass(frozen=True, slots=True)
class BeginRead:
    """Read from ``peer``; the result comes back through ``read_proven`` or ``read_void``."""

    key: RequestKey
    peer: PeerDescriptor
    read: StartRead


@dataclass(frozen=True, slots=True)
class AbortReads:
    """The attempt's reads are of no use any more; they still have to be awaited."""

    key: RequestKey


@dataclass(frozen=True, slots=True)
class TransferCompleted:
    """The lease at ``source`` may end. ``notified``: it has been told by the read itself."""

    key: RequestKey
    lease_id: int
    source: WorkerKey
    notified: bool


Order = AddRequest | CancelRequest | GiveFirstToken | KvArrived | ReadsDone | BeginRead | AbortReads | TransferCompleted


@dataclass(slots=True)
class _Attempt(Attempt):
    reads: SequenceReads | None = None


class DecodeDesk(AttemptDesk[_Attempt, News, Order]):
    """All decode attempts of one worker process. Single-threaded; every method may add news and orders."""

    def __init__(
        self,
        fingerprint: Fingerprint,
        *,
        vocab_size: int,
        max_reads_per_sequence: int = reads.MAX_READS_PER_SEQUENCE,
        max_attempts: int = MAX_ATTEMPTS,
        max_news: int = MAX_NEWS,
    ) -> None:
        super().__init__(max_attempts=max_attempts, max_news=max_news)
        self.void_reads: dict[str, int] = {}
        self._ours = fingerprint
        self._vocab_size = vocab_size
        self._max_reads = max_reads_per_sequence
        self._landing: dict[RequestKey, SequenceReads] = {}

    # -- looking ----------------------------------------------------------------------------------------

    @property
    def landing(self) -> int:
        """Attempts that are over but whose reads are still under way."""
        return len(self._landing)

    def context_to_compute(self, key: RequestKey) -> int:
        """Context tokens of an attempt that is prefilled here; 0 for any other."""
        attempt = self._attempts.get(key)
        return attempt.request.context_len if attempt is not None and attempt.request.mode is Mode.LOCAL else 0

    # -- commands ---------------------------------------------------------------------------------------

    def end_session(self, session: str) -> None:
        """The router is gone for good: stop its attempts."""
        self.drop_news(session)
        for attempt in self._of_session(session):
            self._close(attempt, AttemptOver(attempt.key, "CANCELLED", "the router's session is lost"))

    def begin(self, session: str, request: EngineRequest, source: PeerDescriptor | None) -> None:
        """A new sequence; ``source`` is where its KV is read from, only with REMOTE. Repeats and attempts older
        than a known one are ignored; a newer one stops the older.
        """
        key = request.key
        assert (request.mode is Mode.REMOTE) == (source is not None), request.mode
        known = self._attempts.get(key)
        if known is not None and known.session != session:
            # Its router has come back, and binds it here again before the old life of it has ended.
            error = ResourceExhausted(f"{key} is still ending here", ENDING_RETRY_S)
            self._tell(session, ended_by(key, error))
            return
        if self._is_old(session, key):
            return
        if source is not None:
            try:
                check_compatible(self._ours, source.fingerprint)
            except FingerprintMismatch as mismatch:
                self._tell(session, ended_by(key, mismatch))
                return
        if self._is_full(session, key):
            return
        kv = None
        if source is not None:
            kv = SequenceReads(key, source, self._ours, request.prompt + request.generated, self._max_reads)
        self._enter(_Attempt(request, session, reads=kv))

    def offer(self, ticket: Ticket, now_unix_s: float, now_s: float) -> None:
        """KV that may be read. Tickets for unknown or finished attempts are dropped."""
        attempt = self._attempts.get(ticket.key)
        if attempt is not None and attempt.closing is None and attempt.reads is not None:
            self._act(attempt.key, attempt.reads, attempt.reads.offer(ticket, now_unix_s, now_s))

    def malformed_ticket(self, key: RequestKey, void: KvReadVoid) -> None:
        """What came for ``key`` is no ticket."""
        attempt = self._attempts.get(key)
        if attempt is not None and attempt.closing is None and attempt.reads is not None:
            self._act(key, attempt.reads, attempt.reads.malformed(void))

    def first_token(self, key: RequestKey, index: int, token: int, now_s: float) -> None:
        """The first token, sampled elsewhere. One at another position than the next is ignored."""
        attempt = self._attempts.get(key)
        if attempt is None or attempt.closing is not None or attempt.reads is None:
            return
        if index != len(attempt.request.generated):
            return
        if not 0 <= token < self._vocab_size:
            error = InvalidArgument("first_token", token, f"token ids lie in [0, {self._vocab_size})")
            self._close(attempt, ended_by(key, error))
            return
        attempt.reads.prefill_ended(now_s)
        self._orders.append(GiveFirstToken(key, token))

    def end_waiting(self, message: str) -> None:
        """End what has no blocks yet, so that the router sends it elsewhere."""
        for attempt in self._waiting():
            self._close(attempt, AttemptOver(attempt.key, "UNAVAILABLE", message))

    def end_everything(self, message: str) -> None:
        """End all attempts (role change, shutdown)."""
        for attempt in self._all():
            self._close(attempt, AttemptOver(attempt.key, "UNAVAILABLE", message))

    def engine_lost(self, error: WeirError) -> None:
        """The engine is gone: no event will come any more; all attempts are over."""
        for attempt in self._all():
            self._stop_reads(attempt)
            self._forget(attempt, ended_by(attempt.key, error))

    # -- reads ------------------------------------------------------------------------------------------

    def read_proven(self, key: RequestKey, read_id: int, result: ReadResult, now_s: float) -> None:
        """A read that was begun ended well."""
        kv = self._reads_of(key)
        self._act(key, kv, kv.read_proven(read_id, result, now_s))

    def read_void(self, key: RequestKey, read_id: int, void: KvReadVoid, now_s: float) -> None:
        """A read that was begun may not be used, and no byte of it lands any more."""
        kv = self._reads_of(key)
        self._act(key, kv, kv.read_void(read_id, void, now_s))

    def _reads_of(self, key: RequestKey) -> SequenceReads:
        attempt = self._attempts.get(key)
        kv = self._landing.get(key) if attempt is None else attempt.reads
        assert kv is not None, f"no read of {key} is under way"
        return kv

    def _act(self, key: RequestKey, kv: SequenceReads, actions: Iterable[reads.Action]) -> None:
        attempt = self._attempts.get(key)
        for action in actions:
            if isinstance(action, reads.StartRead):
                self._orders.append(BeginRead(key, kv.peer, action))
            elif isinstance(action, reads.KvProven):
                self._orders.append(KvArrived(key, action.num_tokens))
            elif isinstance(action, reads.ReadsDone):
                self._landing.pop(key, None)
                self._orders.append(ReadsDone(key))
            elif isinstance(action, reads.LeaseUnneeded):
                self._orders.append(TransferCompleted(key, action.lease_id, kv.peer.worker, False))
            elif isinstance(action, reads.Refused):
                self._count(action.reason)
            elif attempt is not None:
                self._tell_outcome(attempt, kv, action)

    def _tell_outcome(self, attempt: _Attempt, kv: SequenceReads, outcome: reads.KvComplete | reads.Void) -> None:
        if isinstance(outcome, reads.Void):
            self._count(outcome.reason)
            read = KvRead(attempt.key, outcome.lease_id, outcome.reason, outcome.detail, outcome.timings)
        else:
            read = KvRead(attempt.key, outcome.lease_id, "", "", outcome.timings)
            if outcome.lease_id:
                done = TransferCompleted(attempt.key, outcome.lease_id, kv.peer.worker, outcome.notified)
                self._orders.append(done)
        self._tell(attempt.session, read)

    def _count(self, reason: str) -> None:
        self.void_reads[reason] = self.void_reads.get(reason, 0) + 1

    # -- engine events ----------------------------------------------------------------------------------

    def refused(self, key: RequestKey, error: WeirError) -> None:
        """The engine did not take the request."""
        attempt = self._attempts.get(key)
        if attempt is not None:
            self._stop_reads(attempt)
            self._forget(attempt, attempt.closing or ended_by(key, error))

    def on_events(self, events: Iterable[Event], now_s: float) -> None:
        """News of an engine step; events of keys that are not here are left alone."""
        batch = list(events)
        finished = {event.key: event for event in batch if isinstance(event, Finished)}
        for event in batch:
            attempt = self._attempts.get(event.key)
            if attempt is None or isinstance(event, Progress):
                continue
            if isinstance(event, Started):
                self._on_started(attempt, event, now_s)
            elif isinstance(event, Preempted):
                self._stop_reads(attempt)
            elif isinstance(event, TokensOut):
                if attempt.closing is None:
                    self._on_tokens(attempt, event, finished.get(event.key))
            elif isinstance(event, Finished):
                self._on_finished(attempt, event)

    def _on_started(self, attempt: _Attempt, event: Started, now_s: float) -> None:
        first, attempt.started = not attempt.started, True
        if first and attempt.closing is None:
            self._tell(attempt.session, AttemptStarted(event.key, event.cached_tokens, event.queued_s))
        kv = attempt.reads
        if kv is not None and not kv.started:
            self._act(attempt.key, kv, kv.blocks_known(event.cached_tokens, event.block_table, now_s))

    def _on_tokens(self, attempt: _Attempt, event: TokensOut, end: Finished | None) -> None:
        finish, usage = None, None
        if end is not None and end.reason in (FinishReason.STOP, FinishReason.LENGTH):
            # The engine tells the end of a sequence in the step of its last token.
            finish, usage = end.reason, end.usage
        self._tell(
            attempt.session,
            NewTokens(event.key, event.first_index, event.tokens, event.logprobs, event.prefill_s, finish, usage),
        )
        if finish is not None:
            self._stop_reads(attempt)
            self._forget(attempt, AttemptOver(event.key, "OK"))

    def _on_finished(self, attempt: _Attempt, event: Finished) -> None:
        self._stop_reads(attempt)
        if attempt.closing is not None:
            self._forget(attempt, attempt.closing)
        elif event.reason in (FinishReason.STOP, FinishReason.LENGTH):
            # The token that ended it was made elsewhere.
            last = NewTokens(event.key, event.usage.completion, (), None, 0.0, event.reason, event.usage)
            self._tell(attempt.session, last)
            self._forget(attempt, AttemptOver(event.key, "OK"))
        elif event.error is not None:
            self._forget(attempt, ended_by(event.key, event.error))
        else:
            self._forget(attempt, AttemptOver(event.key, "CANCELLED", "cancelled"))

    # -- inside -----------------------------------------------------------------------------------------

    def _stop(self, attempt: _Attempt, over: AttemptOver) -> None:
        self._close(attempt, over)

    def _close(self, attempt: _Attempt, over: AttemptOver) -> None:
        if attempt.closing is not None:
            return
        attempt.closing = over
        # Before the engine's blocks go into quarantine, so that no new read begins behind its back.
        self._stop_reads(attempt)
        self._orders.append(CancelRequest(attempt.key))

    def _stop_reads(self, attempt: _Attempt) -> None:
        kv = attempt.reads
        if kv is None or kv.closed:
            return
        if kv.outstanding:
            self._orders.append(AbortReads(attempt.key))
        self._act(attempt.key, kv, kv.close())

    def _forget(self, attempt: _Attempt, over: AttemptOver) -> None:
        if attempt.reads is not None and attempt.reads.outstanding:
            self._landing[attempt.key] = attempt.reads
        self._leave(attempt, over)
