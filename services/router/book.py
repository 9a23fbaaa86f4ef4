"""The truth about every request of this router. Pure: facts and times come in, commands go out.

    admit ─► waiting ─► dispatched: BeginPrefill to P; once it runs there, BeginDecode to D if one has room (early
                │                   binding)
                │           KvReady, FirstToken:  P ─► D as they come; the first token to the consumer too
                │           read proven: the lease is released; tokens: D ─► consumer
                │           refused by D: P keeps the KV, any D that gets room takes it (late binding)
                └─◄─ back-off ─◄─ attempt lost (P gone, D gone while decoding, void reads)

Everything a worker says carries (request, attempt) and comes from a leg: what does not fit the entry's present
attempt and leg is ignored and counted. A position is emitted once and in order, always: ``Entry.generated`` is
what was emitted. Whoever drives the book calls a fact, then does what ``drain`` returns, in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from weir.errors import DeadlineExceeded, RequestCancelled, ResourceExhausted, Unavailable, WeirError
from weir.ids import WorkerKey
from weir.lifecycle import FinishReason, RequestState
from weir.services.router.admission import Gate
from weir.services.router.commands import (
    Admission,
    Command,
    Emit,
    PublishCancel,
    SendFirstToken,
    SendKvReady,
)
from weir.services.router.ending import TOO_LARGE, ended_too_early, error_of
from weir.services.router.entry import NEVER_S, Entry
from weir.services.router.facts import BookLimits, EndedNews, FirstTokenNews
from weir.services.router.fleet import Fleet
from weir.services.router.journal import READ
from weir.services.router.ledger import Ledger
from weir.services.router.lengths import OutputLengths
from weir.services.router.placing import Placing
from weir.services.router.policy import Policy
from weir.services.router.recovery import Recovery
from weir.services.router.retry import RetryBudget
from weir.services.router.timers import Timers

FATAL_CODES = frozenset({"INVALID_ARGUMENT", "UNIMPLEMENTED", "UNAUTHENTICATED"})
"""Ends that no other worker would change."""
DEADLINE_SLACK_S = 0.05
"""A worker may notice a deadline this much before the router does."""


class RequestBook:
    """See the module. ``random`` gives numbers in [0, 1) for jitter. Not thread-safe; never blocks."""

    def __init__(
        self,
        fleet: Fleet,
        policy: Policy,
        limits: BookLimits,
        budget: RetryBudget,
        random: Callable[[], float],
    ) -> None:
        self._fleet = fleet
        self._limits = limits
        self._budget = budget
        self._ledger = Ledger(fleet)
        self._entries = self._ledger.entries
        self._timers = Timers(self._entries)
        self._placing = Placing(self._ledger, self._timers, fleet, policy, limits.lease_s)
        self._lengths = OutputLengths()
        self._gate = Gate(fleet, policy)
        self._refusals: Counter[str] = Counter()
        self._recovery = Recovery(
            self._ledger, self._placing, self._timers, fleet, limits, budget, random, self._lengths, self._gate
        )

    # what is asked of the book

    def __len__(self) -> int:
        return len(self._entries)

    def entries(self) -> list[Entry]:
        """Requests under way, oldest first; to be read only."""
        return list(self._entries.values())

    @property
    def waiting(self) -> int:
        """Requests that wait for a worker."""
        return self._placing.waiting

    @property
    def ended(self) -> Counter[str]:
        """Requests ended since start, by the name of their last state."""
        return self._ledger.ended

    @property
    def stale_facts(self) -> int:
        """Facts that were ignored because their attempt or leg is no more."""
        return self._ledger.stale_facts

    @property
    def void_reads(self) -> Counter[str]:
        """Void reads, by reason."""
        return self._recovery.void_reads

    @property
    def retries(self) -> Counter[str]:
        """Further tries, by what made them necessary."""
        return self._recovery.retries

    @property
    def decisions(self) -> Counter[str]:
        """Placements, by reason."""
        return self._placing.decisions

    @property
    def local_prefills(self) -> Counter[str]:
        """Requests that were not split, by reason."""
        return self._placing.local_prefills

    @property
    def refusals(self) -> Counter[str]:
        """Requests refused before any work, by reason."""
        return self._refusals + self._gate.refusals + self._recovery.refusals

    def drain(self) -> list[Command]:
        """The commands since the last drain, in order."""
        commands = self._ledger.commands
        self._ledger.commands = []
        return commands

    def next_due_s(self) -> float:
        """When ``tick`` has something to do at the latest; inf when nothing is timed. May be early."""
        return self._timers.next_due_s()

    def check_integrity(self) -> None:
        """Assert that the indices agree with the entries."""
        self._ledger.check_integrity()
        assert self.waiting == sum(entry.waiting for entry in self._entries.values())
        for entry in self._entries.values():
            dispatched = entry.prefill is not None or entry.decode is not None
            places = entry.waiting + dispatched + (entry.retry_s != NEVER_S)
            assert places == 1, f"{entry.request_id} is in {places} places"
        for view in self._fleet:
            decoding = {entry.request_id for entry in self._entries.values() if entry.decode == view.key}
            assert view.bound == decoding, f"{view.key} is thought to decode what it does not"

    # facts: from the door

    def admit(self, admission: Admission, now_s: float) -> None:
        """Take a request. Raises ResourceExhausted, with the bound, when there are too many already."""
        assert admission.request_id not in self._entries, "a request is admitted once"
        if len(self._entries) >= self._limits.max_active + self._limits.max_queued:
            self._refuse(admission, "total_limit", f"{len(self._entries)} requests are under way or wait", now_s)
        if len(self._entries) - self.waiting >= self._limits.max_active:
            self._refuse(admission, "active_limit", f"{self._limits.max_active} requests are under way", now_s)
        self._check_tenant(admission, now_s)
        entry = self._admitted(admission, now_s)
        self._ledger.open(entry)
        self._ledger.enter(entry, RequestState.ADMITTED, now_s)
        self._placing.wait(entry)
        self._placing.run(now_s)
        if entry.waiting and self.waiting > self._limits.max_queued:
            self._placing.leave(entry)
            self._ledger.close(entry)
            self._refuse(admission, "queue_limit", f"{self.waiting} requests wait for a worker", now_s)
        self._budget.note_request(now_s)
        self._timers.watch(entry, admission.deadline_s)

    def _refuse(self, admission: Admission, reason: str, what: str, now_s: float) -> None:
        self._refusals[reason] += 1
        retry_s = self._gate.retry_after_s(admission, self._placing.queue_of(admission.model), now_s)
        error = ResourceExhausted(f"{what}, which is the limit", retry_s)
        self._ledger.reject(admission, error, now_s)
        raise error

    def _check_tenant(self, admission: Admission, now_s: float) -> None:
        """Raises ResourceExhausted when its tenant has as many requests here as it may have."""
        tenant, limits = admission.tenant, self._limits
        active = self._ledger.tenants[tenant]
        if 0 < limits.tenant_max_active <= active:
            self._refuse(admission, "tenant_active_limit", f"tenant {tenant!r} has {active} requests under way", now_s)
        queue = self._placing.queue_of(admission.model)
        queued = queue.of_tenant(tenant) if queue is not None else 0
        if 0 < limits.tenant_max_queued <= queued:
            self._refuse(admission, "tenant_queue_limit", f"tenant {tenant!r} has {queued} requests waiting", now_s)

    def _admitted(self, admission: Admission, now_s: float) -> Entry:
        """The entry of a request whose SLO can be met; ResourceExhausted when it cannot."""
        expected = self._lengths.expect(admission.tenant, len(admission.prompt), admission.sampling.max_tokens)
        patience_s = now_s + self._limits.queue_timeout_s
        entry = Entry(admission, now_s, patience_s, expected)
        try:
            promise = self._gate.check(entry, self._placing.queue_of(admission.model), now_s)
        except ResourceExhausted as error:
            self._ledger.reject(admission, error, now_s)
            raise
        entry.patience_s = min(patience_s, promise.until_s)
        return entry

    def cancel(self, request_id: str, reason: str, now_s: float) -> bool:
        """The client left or cancelled; whether the request was under way."""
        entry = self._entries.get(request_id)
        if entry is None:
            return False
        self._publish_cancel(entry, reason)
        self._recovery.fail(entry, now_s, RequestCancelled(reason), RequestState.CANCELLED)
        return True

    def _publish_cancel(self, entry: Entry, reason: str) -> None:
        trace = entry.admission.traceparent
        self._ledger.commands.append(PublishCancel(entry.request_id, entry.attempt, reason, trace))

    def stop(self, request_id: str, tokens: int, stop_string: str, now_s: float) -> None:
        """A stop string was complete with the generated token number ``tokens``, counted from 1."""
        entry = self._entries.get(request_id)
        if entry is None:
            return
        assert 0 < tokens <= len(entry.generated), "a stop string ends in what was emitted"
        del entry.generated[tokens:]
        self._recovery.finish(entry, now_s, FinishReason.STOP, stop_string=stop_string)

    def close(self, now_s: float, reason: str) -> None:
        """End everything: the router stops."""
        self._placing.stop()
        for entry in list(self._entries.values()):
            self._recovery.fail(entry, now_s, Unavailable(reason), RequestState.FAILED)

    # facts: from the prefill leg

    def prefill_started(
        self, worker: WorkerKey, request_id: str, attempt: int, cached_tokens: int, queue_ms: float, now_s: float
    ) -> None:
        """The prompt began to run: D may read along."""
        entry = self._ledger.on_leg(request_id, attempt, worker, prefill=True)
        if entry is None:
            return
        if not entry.prefill_started:
            self._ledger.prefill_begun(entry)
            self._placing.bind_unbound(now_s)
        entry.prefill_cached_tokens = cached_tokens
        if not entry.generated:
            entry.stamps.worker_queue_ms = queue_ms

    def kv_ready(
        self, worker: WorkerKey, request_id: str, attempt: int, lease_id: int, final: bool, ticket: Any
    ) -> None:
        """KV may be read under ``lease_id``; passed on to D, now or when there is one."""
        entry = self._ledger.on_leg(request_id, attempt, worker, prefill=True)
        if entry is None:
            return
        if not entry.prefill_started:
            self._ledger.prefill_begun(entry)
        entry.lease_id = lease_id
        entry.tickets.append(ticket)
        entry.final_ticket = entry.final_ticket or final
        if entry.decode is not None:
            self._ledger.commands.append(SendKvReady(entry.decode, ticket))

    def first_token(self, worker: WorkerKey, request_id: str, attempt: int, news: FirstTokenNews, now_s: float) -> None:
        """P has sampled the first token of the attempt: to the consumer at once, and to D."""
        entry = self._ledger.on_leg(request_id, attempt, worker, prefill=True)
        if entry is None or entry.first_token is not None:
            return
        if news.index != len(entry.generated):
            what = f"first token has index {news.index}, not {len(entry.generated)}"
            self._recovery.fault(entry, worker, what, now_s)
            return
        if not entry.prefill_started:
            self._ledger.prefill_begun(entry)
        self._fleet.settle(worker, request_id)
        self._learn_prefill(entry, worker, news, now_s)
        entry.first_token = news.message
        entry.prefill_cached_tokens = news.cached_tokens
        if not entry.generated:
            entry.stamps.worker_prefill_ms = news.prefill_ms
            entry.cached_tokens = min(news.cached_tokens, len(entry.admission.prompt))
        self._ledger.enter(entry, RequestState.PREFILLED, now_s)
        if not self._emit(entry, news.index, (news.token,), news.logprobs, news.finish, now_s):
            return
        if entry.decode is not None:
            self._ledger.commands.append(SendFirstToken(entry.decode, news.message))
            self._ledger.enter(entry, RequestState.TRANSFERRING, now_s)
            self._end_prefill_if_done(entry)
        else:
            self._recovery.await_decode(entry, now_s)

    def _learn_prefill(self, entry: Entry, worker: WorkerKey, news: FirstTokenNews, now_s: float) -> None:
        """What the first token says of its worker: its speed only if it computed nothing else meanwhile."""
        view = self._fleet.get(worker)
        if view is None:
            return
        view.breaker.succeeded()
        computed = len(entry.admission.prompt) + entry.resumed_tokens - news.cached_tokens
        if view.pending_prefill_tokens <= computed:
            view.speed.saw_prefill(news.prefill_ms, computed, news.cached_tokens, now_s)

    # facts: from the decode leg

    def decode_started(
        self, worker: WorkerKey, request_id: str, attempt: int, cached_tokens: int, queue_ms: float
    ) -> None:
        """The sequence has its blocks; ``cached_tokens`` of the prompt were found in D's own cache."""
        entry = self._ledger.on_leg(request_id, attempt, worker, prefill=False)
        if entry is None:
            return
        entry.local_hit_tokens = cached_tokens
        if entry.local:
            entry.prefill_cached_tokens = cached_tokens
            if not entry.generated:
                entry.stamps.worker_queue_ms = queue_ms

    def kv_read_done(
        self,
        worker: WorkerKey,
        request_id: str,
        attempt: int,
        lease_id: int,
        void_reason: str,
        detail: str,
        timings: Any | None,
        now_s: float,
    ) -> None:
        """D's reads under ``lease_id`` are proven (``void_reason`` empty), or void."""
        entry = self._ledger.on_leg(request_id, attempt, worker, prefill=False)
        if entry is None or entry.local or entry.read_done:
            return
        if void_reason:
            self._recovery.read_void(entry, worker, void_reason, detail, now_s)
            return
        entry.read_done = True
        entry.read_until_s = NEVER_S
        entry.kv_read = timings
        self._learn_read(entry, worker, timings, now_s)
        entry.journal.note(now_s, READ, attempt, worker=worker.worker_id, timings=timings)
        if entry.prefill is not None:
            self._ledger.release(entry)
        self._end_prefill_if_done(entry)

    def _learn_read(self, entry: Entry, worker: WorkerKey, timings: Any | None, now_s: float) -> None:
        view = self._fleet.get(worker)
        busy_ms, num_bytes = getattr(timings, "busy_ms", 0.0), getattr(timings, "bytes", 0)
        if view is not None:
            view.speed.saw_read(busy_ms, num_bytes, entry.prefill_name, now_s)

    def tokens(
        self,
        worker: WorkerKey,
        request_id: str,
        attempt: int,
        first_index: int,
        tokens: Sequence[int],
        logprobs: Sequence[Any],
        finish: FinishReason | None,
        usage: Any | None,
        prefill_ms: float,
        now_s: float,
    ) -> None:
        """Tokens from D. Positions that were sent before are dropped; a gap is a fault of D."""
        entry = self._ledger.on_leg(request_id, attempt, worker, prefill=False)
        if entry is None:
            return
        sent = len(entry.generated)
        if first_index != sent:
            if first_index > sent:
                self._recovery.fault(entry, worker, f"tokens start at index {first_index}, not {sent}", now_s)
                return
            tokens, logprobs = tokens[sent - first_index :], logprobs[sent - first_index :]
            if not tokens and finish is None:
                return
        if entry.state is not RequestState.DECODING:
            if not entry.local and entry.first_token is None:
                self._recovery.fault(entry, worker, "tokens came before the first token was sent", now_s)
                return
            self._begin_decoding(entry, prefill_ms, now_s)
        if finish is not None:
            self._fleet.succeeded(worker)
            self._ledger.unlink_decode(entry)
        self._emit(entry, sent, tokens, logprobs, finish, now_s, usage)

    # facts: from either leg

    def attempt_ended(
        self,
        worker: WorkerKey,
        prefill: bool,
        request_id: str,
        attempt: int,
        news: EndedNews,
        now_s: float,
    ) -> None:
        """Nothing of the attempt is left on that leg of ``worker``."""
        entry = self._ledger.on_leg(request_id, attempt, worker, prefill=prefill)
        if entry is None:
            return
        if news.code == "OK":
            error = ended_too_early(entry, worker, prefill)
        else:
            error = error_of(news.code, news.message, worker, news.retry_after_ms)
        if prefill:
            self._ledger.unlink_prefill(entry)
        else:
            self._ledger.unlink_decode(entry)
        if news.code == TOO_LARGE:
            self._recovery.too_large(entry, worker, prefill, error, now_s)
        elif news.code == "CANCELLED" and worker in entry.dropped:
            self._recovery.retry(entry, error, "decode_lost", now_s, charged=False, counts=False)
        elif news.code == "CANCELLED":
            # By others than this router, on the bus: what it cancels itself has left the leg.
            self._publish_cancel(entry, news.message)
            self._recovery.fail(entry, now_s, RequestCancelled(news.message), RequestState.CANCELLED)
        elif news.code in FATAL_CODES:
            self._recovery.fail(entry, now_s, error, RequestState.FAILED)
        elif news.code == "RESOURCE_EXHAUSTED":
            self._recovery.refused(entry, worker, prefill, error, news.retry_after_ms, now_s)
        elif news.code == "UNAVAILABLE":
            self._recovery.moved(entry, worker, prefill, error, now_s)
        elif news.code != "DEADLINE_EXCEEDED":
            self._recovery.leg_gone(entry, worker, prefill, error, now_s, charged=news.code != "OK")
        elif now_s >= entry.admission.deadline_s - DEADLINE_SLACK_S:
            self._recovery.fail(entry, now_s, error, RequestState.FAILED)
        else:  # only the lease has lapsed
            self._recovery.leg_gone(entry, worker, prefill, error, now_s, charged=False)

    def worker_lost(self, worker: WorkerKey, now_s: float) -> None:
        """The sessions with ``worker`` are broken: it has dropped, or will drop, all that it had of ours."""
        view = self._fleet.get(worker)
        if view is not None:
            view.connected = False
        for request_id in sorted(self._ledger.legs.get(worker, ())):
            entry = self._entries.get(request_id)
            state = "it waited" if entry is None else entry.state.value
            error = Unavailable(f"{worker.worker_id} was lost while {state}")
            if entry is not None and entry.prefill == worker:
                self._ledger.unlink_prefill(entry)
                self._recovery.leg_gone(entry, worker, True, error, now_s, charged=False)
            if entry is not None and entry.decode == worker:
                self._ledger.unlink_decode(entry)
                self._recovery.leg_gone(entry, worker, False, error, now_s, charged=False)
        assert worker not in self._ledger.legs, "a lost worker has no legs"

    def fleet_changed(self, now_s: float) -> None:
        """Workers came, went, or reported another load: place what waits."""
        self._placing.run(now_s)

    def tick(self, now_s: float) -> None:
        """Time has passed: deadlines, back-offs, patience."""
        while (entry := self._timers.pop_due(now_s)) is not None:
            self._due(entry, now_s)

    def _due(self, entry: Entry, now_s: float) -> None:
        if now_s >= entry.admission.deadline_s:
            allowed_s = entry.admission.deadline_s - entry.admission.received_s
            error: WeirError = DeadlineExceeded(f"{allowed_s:.3f} s passed while {entry.state.value}")
            self._publish_cancel(entry, "deadline")
            self._recovery.fail(entry, now_s, error, RequestState.FAILED)
        elif now_s >= entry.retry_s:
            entry.retry_s = NEVER_S
            self._placing.wait(entry)
            self._placing.run(now_s)
        elif now_s >= entry.read_until_s:
            error = Unavailable(f"{entry.prefill_name} was lost before its KV was read")
            self._recovery.retry(entry, error, "prefill_lost", now_s, charged=False)
        elif (entry.waiting or entry.idles_prefilled) and now_s >= entry.patience_s:
            self._recovery.give_up(entry, now_s)
        else:
            self._placing.run(now_s)  # a refusal may have lapsed

    # tokens

    def _emit(
        self,
        entry: Entry,
        index: int,
        tokens: Sequence[int],
        logprobs: Sequence[Any],
        finish: FinishReason | None,
        now_s: float,
        usage: Any | None = None,
    ) -> bool:
        """Pass tokens on; whether the request goes on after them. max_tokens holds whatever a worker says."""
        generated = entry.generated
        assert index == len(generated), "a position is emitted once and in order"
        left = entry.admission.sampling.max_tokens - index
        if len(tokens) > left:
            tokens, logprobs, finish = tokens[:left], logprobs[:left], FinishReason.LENGTH
        if tokens:
            if not generated:
                self._note_revision(entry)
            generated.extend(tokens)
            if index < 2:
                _stamp(entry, now_s)
            self._ledger.commands.append(Emit(entry.admission.request_id, index, tokens, logprobs))
        if finish is None:
            if len(tokens) < left:
                return True
            finish = FinishReason.LENGTH
        self._recovery.finish(entry, now_s, finish, usage=usage)
        return False

    def _note_revision(self, entry: Entry) -> None:
        """Its first token is made: other weights would go on with another answer."""
        maker = entry.prefill or entry.decode
        view = self._fleet.get(maker) if maker is not None else None
        if view is not None:
            entry.revision = view.info.revision

    def _begin_decoding(self, entry: Entry, prefill_ms: float, now_s: float) -> None:
        """D's first tokens of this attempt; they prove that its KV is complete."""
        if entry.local and not entry.generated:
            entry.stamps.worker_prefill_ms = prefill_ms
            entry.cached_tokens = min(entry.prefill_cached_tokens, len(entry.admission.prompt))
        if entry.prefill is not None:
            self._ledger.end_prefill(entry, "its KV was read")
        entry.read_done = True
        entry.read_until_s = NEVER_S
        self._ledger.enter(entry, RequestState.DECODING, now_s)
        view = self._fleet.get(entry.decode) if entry.decode is not None else None
        if view is not None:
            view.joined(entry.request_id)
            if self._ledger.unbound:
                self._placing.bind_unbound(now_s)

    def _end_prefill_if_done(self, entry: Entry) -> None:
        """Once the KV is proven and the first token is out, P has nothing more for this request."""
        if entry.read_done and entry.first_token is not None and entry.prefill is not None:
            self._ledger.end_prefill(entry, "its KV was read")


def _stamp(entry: Entry, now_s: float) -> None:
    """Note the moments of the first two tokens."""
    stamps = entry.stamps
    stamps.first_s = stamps.first_s or now_s
    if len(entry.generated) > 1:
        stamps.second_s = now_s
