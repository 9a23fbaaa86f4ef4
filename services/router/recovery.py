"""How requests end, and what is done before they have to: another read, another worker, another attempt. Pure.

See the failure table in the design: what is lost decides, together with what the consumer already has. ``charged``
failures were reported by living workers: they count against the retry budget, and the worker is avoided.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from weir.errors import ResourceExhausted, Unavailable, WeirError
from weir.ids import WorkerKey
from weir.lifecycle import FinishReason, RequestState
from weir.services.router.admission import Gate
from weir.services.router.commands import SendKvReady
from weir.services.router.ending import exhausted, over_budget, too_large
from weir.services.router.entry import Entry
from weir.services.router.facts import BookLimits
from weir.services.router.fleet import Fleet
from weir.services.router.journal import READ_VOID, REBIND, REFUSED, RETRY
from weir.services.router.ledger import Ledger
from weir.services.router.lengths import OutputLengths
from weir.services.router.placing import Placing
from weir.services.router.retry import RetryBudget, backoff_s
from weir.services.router.timers import Timers

TIMEOUT = "timeout"
OF_THE_LINK = frozenset({"transport", TIMEOUT})
"""Void reads for which the way between the two workers may be to blame: nobody can say which end of it."""
REREADABLE = OF_THE_LINK | {"checksum"}
"""Void reads that another read under the same lease may heal; the others need another prefill."""
MAX_REREADS = 2
"""Void reads of one attempt after which KV that is still there is read once more."""
MIN_REFUSAL_S = 0.05
MAX_MOVES = 32
"""Attempts, whatever ended them, up to which a request is moved without that counting as a failure."""


class Recovery:
    """Changes entries through ledger and placing; ``random`` gives numbers in [0, 1) for jitter."""

    def __init__(
        self,
        ledger: Ledger,
        placing: Placing,
        timers: Timers,
        fleet: Fleet,
        limits: BookLimits,
        budget: RetryBudget,
        random: Callable[[], float],
        lengths: OutputLengths,
        gate: Gate,
    ) -> None:
        self.void_reads: Counter[str] = Counter()
        self.retries: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        """Requests given up before any worker took them, by reason."""
        self._ledger = ledger
        self._placing = placing
        self._timers = timers
        self._fleet = fleet
        self._limits = limits
        self._budget = budget
        self._random = random
        self._lengths = lengths
        self._gate = gate

    def await_decode(self, entry: Entry, now_s: float) -> None:
        """The prompt is prefilled, or will be, and no D is bound: take the first that has room."""
        entry.patience_s = max(entry.patience_s, now_s + self._limits.queue_timeout_s)
        self._timers.watch(entry, entry.patience_s)
        self._placing.bind_unbound(now_s)

    def read_void(self, entry: Entry, worker: WorkerKey, reason: str, detail: str, now_s: float) -> None:
        """Read once more if that can help and the lease lives, by another D if this one was too slow; else prefill
        again, on another P if it was the link to this one that failed, or where it is decoded if there is no other.
        """
        self.void_reads[reason] += 1
        entry.void_reads += 1
        entry.journal.note(now_s, READ_VOID, entry.attempt, worker=worker.worker_id, reason=reason, detail=detail)
        error = Unavailable(f"KV read void on {worker.worker_id} ({reason}): {detail}")
        if reason in OF_THE_LINK:
            entry.avoid |= {worker}
        rereadable = entry.prefill is not None and reason in REREADABLE and entry.void_reads <= MAX_REREADS
        if rereadable and self._read_again(entry, worker, reason, error, now_s):
            return
        if entry.prefill is not None and reason in OF_THE_LINK:
            entry.avoid |= {entry.prefill}
            # Another prefill helps only where its KV comes by another way.
            prefills = self._fleet.able(entry.admission.model, entry.demand).prefills.views
            entry.stays = all(view.key in entry.avoid for view in prefills)
        self.retry(entry, error, "read_void", now_s, charged=True)

    def _read_again(self, entry: Entry, worker: WorkerKey, reason: str, error: WeirError, now_s: float) -> bool:
        """Whether it is read again under the same lease: the same way once, unless the read had all its time."""
        if reason != TIMEOUT and entry.void_reads == 1:
            self._ledger.commands.extend([SendKvReady(worker, ticket) for ticket in entry.tickets])
            return True
        if reason not in OF_THE_LINK or not self._placing.bind_elsewhere(entry, now_s):
            return False
        self.retries["rebind"] += 1
        entry.story.add(entry.attempt, str(error))
        entry.journal.note(now_s, REBIND, entry.attempt, error=str(error))
        return True

    def refused(
        self,
        entry: Entry,
        worker: WorkerKey,
        prefill: bool,
        error: WeirError,
        retry_after_ms: float,
        now_s: float,
    ) -> None:
        """No room there for now. That is no failure before work was done: somebody else, or later."""
        self._note_refusal(entry, worker, error, now_s)
        until_s = now_s + max(retry_after_ms / 1e3, MIN_REFUSAL_S)
        view = self._fleet.get(worker)
        if view is not None and prefill:
            view.refuses_prefill_until_s = until_s
        elif view is not None:
            view.refuses_decode_until_s = until_s
        self._timers.watch(entry, until_s)
        if entry.state is RequestState.DECODING or (prefill and entry.first_token is not None):
            self.leg_gone(entry, worker, prefill, error, now_s, charged=True)
        else:
            self._place_elsewhere(entry, prefill, now_s)

    def too_large(self, entry: Entry, worker: WorkerKey, prefill: bool, error: WeirError, now_s: float) -> None:
        """The worker can never hold it, whatever its registry entry says. No failure: one with more room takes it."""
        self._note_refusal(entry, worker, error, now_s)
        entry.too_small |= {worker}
        model = entry.admission.model
        if self._fleet.could_decode(model, entry.demand):
            self._place_elsewhere(entry, prefill, now_s)
        else:
            refusal = too_large(entry, self._fleet.token_limit(model), str(error))
            self.fail(entry, now_s, refusal, RequestState.FAILED)

    def _note_refusal(self, entry: Entry, worker: WorkerKey, error: WeirError, now_s: float) -> None:
        entry.story.add(entry.attempt, str(error))
        entry.journal.note(now_s, REFUSED, entry.attempt, worker=worker.worker_id, error=str(error))

    def _place_elsewhere(self, entry: Entry, prefill: bool, now_s: float) -> None:
        """A leg was refused before work was done there: under the same lease if there is one, or from the start."""
        if not prefill and entry.prefill is not None and not entry.read_done:
            self.await_decode(entry, now_s)
        else:
            self._ledger.drop_legs(entry, "refused by the other leg")
            self._placing.wait(entry)
            self._placing.run(now_s)

    def moved(self, entry: Entry, worker: WorkerKey, prefill: bool, error: WeirError, now_s: float) -> None:
        """The worker changes its role or stops, and sends the work away: no failure, somebody else does it.

        Until the registry tells of the change the worker is left alone for a moment.
        """
        until_s = now_s + MIN_REFUSAL_S
        view = self._fleet.get(worker)
        if view is not None and prefill:
            view.refuses_prefill_until_s = until_s
        elif view is not None:
            view.refuses_decode_until_s = until_s
        self._timers.watch(entry, until_s)
        counts = entry.attempt >= MAX_MOVES
        self.leg_gone(entry, worker, prefill, error, now_s, charged=counts, counts=counts)

    def leg_gone(
        self,
        entry: Entry,
        worker: WorkerKey,
        prefill: bool,
        error: WeirError,
        now_s: float,
        *,
        charged: bool,
        counts: bool = True,
    ) -> None:
        """``counts``: whether it is one of the failures after which a request is given up."""
        if charged:
            entry.avoid |= {worker}
            self._fleet.failed(worker, now_s)
        if prefill:
            self._prefill_gone(entry, error, now_s, charged=charged, counts=counts)
        else:
            self._decode_gone(entry, error, now_s, charged=charged, counts=counts)

    def _prefill_gone(self, entry: Entry, error: WeirError, now_s: float, *, charged: bool, counts: bool) -> None:
        """Nothing of the attempt is on P any more. Fine once D has its KV; D may be just reading it."""
        if entry.first_token is not None and entry.decode is not None:
            if entry.read_done:
                return
            # One that fell silent was given up long after its KV could have been read.
            until_s = entry.transferring_s + self._limits.orphan_read_s
            if entry.final_ticket and now_s < until_s:
                entry.read_until_s = until_s
                self._timers.watch(entry, until_s)
                return
        self.retry(entry, error, "prefill_lost", now_s, charged=charged, counts=counts)

    def _decode_gone(self, entry: Entry, error: WeirError, now_s: float, *, charged: bool, counts: bool) -> None:
        """Nothing of the attempt is on D any more: another D under the same lease, or another attempt."""
        if entry.prefill is None or entry.read_done:
            self.retry(entry, error, "decode_lost", now_s, charged=charged, counts=counts)
            return
        entry.story.add(entry.attempt, str(error))
        entry.failures += counts
        if entry.failures >= self._limits.max_attempts:
            self.fail(entry, now_s, exhausted(entry), RequestState.FAILED)
            return
        self.retries["rebind"] += 1
        entry.journal.note(now_s, REBIND, entry.attempt, error=str(error))
        self.await_decode(entry, now_s)

    def fault(self, entry: Entry, worker: WorkerKey, what: str, now_s: float) -> None:
        """A worker broke the protocol for this request: do it again, elsewhere if possible."""
        entry.avoid |= {worker}
        self._fleet.failed(worker, now_s)
        error = Unavailable(f"fault of {worker.worker_id}: {what}")
        self.retry(entry, error, "fault", now_s, charged=True)

    def retry(
        self, entry: Entry, error: WeirError, kind: str, now_s: float, *, charged: bool, counts: bool = True
    ) -> None:
        """Prefill again after a back-off, from the prompt and the tokens already sent."""
        self._ledger.drop_legs(entry, f"attempt {entry.attempt} failed")
        entry.journal.note(now_s, RETRY, entry.attempt, kind=kind, error=str(error))
        entry.story.add(entry.attempt, str(error))
        entry.failures += counts
        if entry.failures >= self._limits.max_attempts:
            self.fail(entry, now_s, exhausted(entry), RequestState.FAILED)
            return
        if charged and not self._budget.take(now_s):
            self.fail(entry, now_s, over_budget(entry), RequestState.FAILED)
            return
        self.retries[kind] += 1
        wait_s = backoff_s(max(1, entry.failures), self._limits.backoff_first_s, self._random())
        entry.retry_s = now_s + wait_s
        entry.patience_s = entry.retry_s + self._limits.queue_timeout_s
        self._timers.watch(entry, entry.retry_s)

    def give_up(self, entry: Entry, now_s: float) -> None:
        """No worker took it within its patience."""
        model = entry.admission.model
        waited_s = now_s - entry.admission.received_s
        story = f": {entry.story}" if entry.story else ""
        untouched = entry.attempt == 0
        reason = "no_worker"
        error: WeirError
        if untouched and not self._fleet.could_decode(model, entry.demand):
            reason = "too_large"
            error = too_large(entry, self._fleet.token_limit(model))
        elif entry.revision and not self._fleet.serving(model).of_revision(entry.revision).decodes_any:
            error = Unavailable(f"no worker decodes with the weights that its answer began with{story}")
        elif self._fleet.able(model, entry.demand):
            retry_s = self._gate.retry_after_s(entry.admission, self._placing.queue_of(model), now_s)
            error = ResourceExhausted(f"no room on any worker for {waited_s:.1f} s{story}", retry_s)
        elif self._fleet.serving(model):
            error = Unavailable(f"no worker that can hold it within {waited_s:.1f} s{story}")
        else:
            error = Unavailable(f"no worker for model {model!r} within {waited_s:.1f} s{story}")
        self.refusals[reason] += untouched
        self.fail(entry, now_s, error, RequestState.REJECTED if untouched else RequestState.FAILED)

    def finish(
        self,
        entry: Entry,
        now_s: float,
        reason: FinishReason,
        *,
        stop_string: str = "",
        usage: Any | None = None,
    ) -> None:
        """The normal end. A lease that is still open is released, legs that still run are cancelled."""
        if entry.prefill is not None and entry.first_token is not None:
            self._ledger.end_prefill(entry, "finished")
        self._learn(entry)
        self._placing.leave(entry)
        self._ledger.end(entry, now_s, RequestState.FINISHED, reason, stop_string=stop_string, usage=usage)
        self._placing.run(now_s)

    def _learn(self, entry: Entry) -> None:
        """A request ended as it should: how long its answer was."""
        admission = entry.admission
        self._lengths.learn(admission.tenant, len(admission.prompt), len(entry.generated))

    def fail(self, entry: Entry, now_s: float, error: WeirError, state: RequestState) -> None:
        cancelled = state is RequestState.CANCELLED
        reason = FinishReason.CANCELLED if cancelled else FinishReason.ERROR
        self._placing.leave(entry)
        self._ledger.end(entry, now_s, state, reason, error=error)
        self._placing.run(now_s)
