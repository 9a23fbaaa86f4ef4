"""From waiting to dispatched: the queue for workers, early and late binding. Pure."""

from __future__ import annotations

import heapq
from collections import Counter

from weir.ids import WorkerKey
from weir.lifecycle import RequestState
from weir.services.router.commands import (
    SendBeginDecode,
    SendBeginPrefill,
    SendFirstToken,
    SendKvReady,
)
from weir.services.router.entry import NEVER_S, Entry
from weir.services.router.fleet import Fleet, WorkerView
from weir.services.router.journal import BOUND, ROUTED
from weir.services.router.ledger import Ledger
from weir.services.router.policy import Choice, Policy
from weir.services.router.timers import Timers

MAX_SCANNED = 64
"""Waiting requests looked at per call once one of them found no worker."""


class Placing:
    """Dispatches by priority, then order of arrival; nobody is overtaken by one of the same model."""

    def __init__(self, ledger: Ledger, timers: Timers, fleet: Fleet, policy: Policy, lease_s: float) -> None:
        self.waiting = 0
        """Requests that wait for a worker."""
        self.local_prefills: Counter[str] = Counter()
        self._ledger = ledger
        self._timers = timers
        self._fleet = fleet
        self._policy = policy
        self._lease_ms = lease_s * 1e3
        self._queue: list[tuple[int, int, str]] = []
        self._order = 0
        self._stopped = False

    def stop(self) -> None:
        """Place nothing any more."""
        self._stopped = True

    def wait(self, entry: Entry) -> None:
        """Put ``entry`` into the queue, at its old place if it had one."""
        assert not entry.waiting
        entry.waiting = True
        self.waiting += 1
        if not entry.order:
            self._order += 1
            entry.order = self._order
        heapq.heappush(self._queue, (-entry.admission.priority, entry.order, entry.request_id))
        self._timers.watch(entry, entry.patience_s)

    def leave(self, entry: Entry) -> None:
        """``entry`` waits no more. Does nothing when it does not wait."""
        if entry.waiting:
            entry.waiting = False
            self.waiting -= 1

    def run(self, now_s: float) -> None:
        """Place and bind all that can be now."""
        if self._stopped:
            return
        if self._queue:
            self._place_waiting(now_s)
        if self._ledger.unbound:
            self.bind_unbound(now_s)

    def bind_unbound(self, now_s: float) -> None:
        """What P has begun or finished, oldest first, goes to any D that has room: early and late binding.

        Not before P has begun: a sequence that waits on D takes room there, and may take it only if nothing but
        computing stands between it and its KV. Else those that wait for P's memory and those that hold it while
        they wait for D's could wait for each other.
        """
        full: set[str] = set()
        for request_id in list(self._ledger.unbound):
            entry = self._ledger.entries[request_id]
            assert entry.prefill is not None
            source = self._fleet.get(entry.prefill)
            model = entry.admission.model
            if source is None or model in full:
                continue
            view = self._policy.choose_decode(self._fleet.serving(model), source, entry.demand, now_s)
            if view is None:
                full.add(model)
            else:
                self._bind(entry, view, now_s)

    def _place_waiting(self, now_s: float) -> None:
        blocked: list[tuple[int, int, str]] = []
        full: set[str] = set()
        while self._queue and len(blocked) < MAX_SCANNED:
            item = heapq.heappop(self._queue)
            entry = self._ledger.entries.get(item[2])
            if entry is None or not entry.waiting:
                continue
            model = entry.admission.model
            if model in full or not self._place(entry, now_s):
                full.add(model)
                blocked.append(item)
        for item in blocked:
            heapq.heappush(self._queue, item)

    def _place(self, entry: Entry, now_s: float) -> bool:
        choice = self._policy.choose(self._fleet.serving(entry.admission.model), entry.demand, now_s)
        if choice is None:
            return False
        self.leave(entry)
        entry.reset()
        entry.attempt += 1
        if not entry.generated:
            entry.stamps.dispatched_s = now_s
            entry.stamps.worker_queue_ms = 0.0
        _note_route(entry, choice, now_s)
        if choice.prefill is None:
            assert choice.decode is not None, "a choice names a worker"
            self._begin_local(entry, choice.decode, choice.reason, now_s)
        else:
            self._begin_prefill(entry, choice.prefill, now_s)
        return True

    def _begin_prefill(self, entry: Entry, view: WorkerView, now_s: float) -> None:
        self._ledger.take_prefill(entry, view.key)
        entry.decode_name = ""
        view.note(entry.request_id, now_s, entry.demand.prompt_tokens, 0, 0)
        self._fleet.used(view)
        self._ledger.enter(entry, RequestState.PREFILLING, now_s)
        self._ledger.commands.append(
            SendBeginPrefill(
                worker=view.key,
                attempt=entry.attempt,
                admission=entry.admission,
                generated=tuple(entry.generated),
                timeout_ms=_timeout_ms(entry, now_s),
                lease_ms=self._lease_ms,
            )
        )

    def _begin_local(self, entry: Entry, view: WorkerView, reason: str, now_s: float) -> None:
        self.local_prefills[reason] += 1
        entry.local = True
        entry.prefill_name = view.key.worker_id
        self._take_decode(entry, view, now_s, prefill_tokens=entry.demand.prompt_tokens)
        self._ledger.enter(entry, RequestState.PREFILLING, now_s)
        self._send_begin_decode(entry, view.key, None, now_s)

    def _bind(self, entry: Entry, view: WorkerView, now_s: float) -> None:
        """Give the sequence to D, with all that P has said so far."""
        entry.journal.note(now_s, BOUND, entry.attempt, decode=view.key.worker_id)
        self._take_decode(entry, view, now_s, prefill_tokens=0)
        self._send_begin_decode(entry, view.key, entry.prefill, now_s)
        commands = self._ledger.commands
        commands.extend([SendKvReady(view.key, ticket) for ticket in entry.tickets])
        if entry.first_token is not None:
            commands.append(SendFirstToken(view.key, entry.first_token))
            self._ledger.enter(entry, RequestState.TRANSFERRING, now_s)

    def _take_decode(self, entry: Entry, view: WorkerView, now_s: float, prefill_tokens: int) -> None:
        self._ledger.take_decode(entry, view.key)
        blocks = view.blocks_for(entry.demand.prompt_tokens + 1)
        view.note(entry.request_id, now_s, prefill_tokens, 1, blocks)
        self._fleet.used(view)

    def _send_begin_decode(self, entry: Entry, worker: WorkerKey, source: WorkerKey | None, now_s: float) -> None:
        self._ledger.commands.append(
            SendBeginDecode(
                worker=worker,
                attempt=entry.attempt,
                admission=entry.admission,
                generated=tuple(entry.generated[: entry.resumed_tokens]),
                timeout_ms=_timeout_ms(entry, now_s),
                source=source,
            )
        )


def _note_route(entry: Entry, choice: Choice, now_s: float) -> None:
    """Who was chosen, why, and by which numbers: the policy's, and the load before the request itself counts."""
    scores = dict(choice.scores)
    if choice.prefill is not None:
        scores["prefill_pending_tokens"] = choice.prefill.pending_prefill_tokens
    if choice.decode is not None:
        scores["decode_sequences"] = choice.decode.sequences
        scores["decode_free_blocks"] = choice.decode.free_blocks
    entry.journal.note(
        now_s,
        ROUTED,
        entry.attempt,
        prefill=choice.prefill.key.worker_id if choice.prefill is not None else "",
        decode=choice.decode.key.worker_id if choice.decode is not None else "",
        reason=choice.reason,
        scores=scores,
    )


def _timeout_ms(entry: Entry, now_s: float) -> float:
    """Milliseconds left; 0 is no deadline."""
    deadline_s = entry.admission.deadline_s
    return 0.0 if deadline_s == NEVER_S else max((deadline_s - now_s) * 1e3, 1.0)
