"""From waiting to dispatched: the queue for workers, early and late binding. Pure."""

from __future__ import annotations

from collections import Counter

from weir.ids import WorkerKey
from weir.lifecycle import RequestState, Role
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
from weir.services.router.queue import FairQueue, Waiting
from weir.services.router.roster import Roster
from weir.services.router.timers import Timers

STRANDED_S = 2.0
"""How long KV that nobody can read any more is kept for those who could."""
RECHECK_S = 0.1
"""Predicted waits shrink with time alone: what waits is looked at again after this."""


class Placing:
    """Dispatches by priority, then fairly between tenants, then in order of arrival; each model by itself."""

    def __init__(self, ledger: Ledger, timers: Timers, fleet: Fleet, policy: Policy, lease_s: float) -> None:
        self.waiting = 0
        """Requests that wait for a worker."""
        self.local_prefills: Counter[str] = Counter()
        self.decisions: Counter[str] = Counter()
        """Placements, by reason."""
        self._ledger = ledger
        self._timers = timers
        self._fleet = fleet
        self._policy = policy
        self._lease_ms = lease_s * 1e3
        self._queues: dict[str, FairQueue] = {}
        self._parked: dict[str, tuple[Roster, Waiting]] = {}
        """Requests that none of their model's workers, as they were then, can hold: they let others pass."""
        self._order = 0
        self._recheck_s = 0.0
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
        admission = entry.admission
        tokens = len(admission.prompt) + len(entry.generated)
        cost = tokens + entry.expected_tokens
        self._put(
            admission.model,
            Waiting(entry.request_id, admission.tenant, admission.priority, entry.order, max(cost, 1), tokens),
        )
        self._timers.watch(entry, entry.patience_s)

    def _put(self, model: str, waiting: Waiting) -> None:
        self._queues.setdefault(model, FairQueue()).put(waiting)

    def leave(self, entry: Entry) -> None:
        """``entry`` waits no more. Does nothing when it does not wait."""
        if entry.waiting:
            entry.waiting = False
            self.waiting -= 1
            if self._parked.pop(entry.request_id, None) is None:
                self._take_out(entry)

    def _take_out(self, entry: Entry) -> None:
        queue = self._queues[entry.admission.model]
        queue.remove(entry.request_id)
        if not queue:
            del self._queues[entry.admission.model]

    def queue_of(self, model: str) -> FairQueue | None:
        """What waits for ``model``; None when nothing does. To be read only."""
        return self._queues.get(model)

    def run(self, now_s: float) -> None:
        """Place and bind all that can be now."""
        if self._stopped:
            return
        if self._parked:
            self._unpark()
        for model in list(self._queues):
            self._place_waiting(model, now_s)
        if self._ledger.unbound:
            self.bind_unbound(now_s)

    def bind_unbound(self, now_s: float) -> None:
        """What P has begun or finished, oldest first, goes to any D that has room: early and late binding.

        Not before P has begun: a sequence that waits on D takes room there, and may take it only if nothing but
        computing stands between it and its KV. Else those that wait for P's memory and those that hold it while
        they wait for D's could wait for each other.
        """
        full: dict[str, list[Roster]] = {}
        again: set[str] = set()
        for request_id in list(self._ledger.unbound):
            entry = self._ledger.entries[request_id]
            assert entry.prefill is not None
            source = self._fleet.get(entry.prefill)
            if source is None:
                continue
            model, demand = entry.admission.model, entry.demand
            if self._fleet.serving(model).strands(source.fingerprint):
                self._strand(entry, now_s)
                again.add(model)
                continue
            able = self._fleet.able(model, demand)
            if source.info.role.decodes and all(view is source or not view.info.role.decodes for view in able):
                # Its P, which decodes by now, is the only one that could: it goes on there, from its cache.
                self._place_anew(entry)
                again.add(model)
                continue
            awaited = full.setdefault(model, [])
            free = able if not awaited else _not_awaited(able, awaited)
            if source.info.role.decodes:
                free = [view for view in free if view is not source]
            view = self._policy.choose_decode(free, source, demand, now_s) if free else None
            if view is not None:
                self._bind(entry, view, now_s)
            elif free:
                awaited.append(able)
        for model in sorted(again):
            self._place_waiting(model, now_s)

    def _strand(self, entry: Entry, now_s: float) -> None:
        """Those who decode have other weights by now: what is begun waits a little for the old ones to come back, and
        keeps P's memory no longer than that; the rest is placed anew.
        """
        if entry.first_token is not None:
            entry.patience_s = min(entry.patience_s, now_s + STRANDED_S)
            self._timers.watch(entry, entry.patience_s)
        else:
            self._place_anew(entry)

    def _place_anew(self, entry: Entry) -> None:
        """Nobody will read what P has of it."""
        self._ledger.drop_legs(entry, "nobody can read its KV any more")
        self.wait(entry)

    def bind_elsewhere(self, entry: Entry, now_s: float) -> bool:
        """Take the sequence from its D and give it to another one that has room now; whether there is one."""
        assert entry.prefill is not None
        assert entry.decode is not None
        source, demand = self._fleet.get(entry.prefill), entry.demand
        others = [
            view
            for view in self._fleet.able(entry.admission.model, demand)
            if view.key not in entry.avoid and view.key not in (entry.decode, entry.prefill)
        ]
        if source is None or not others:
            return False
        view = self._policy.choose_decode(others, source, demand, now_s)
        if view is None:
            return False
        self._ledger.drop_decode(entry, "its KV is read elsewhere")
        self._bind(entry, view, now_s)
        return True

    def _place_waiting(self, model: str, now_s: float) -> None:
        """Whoever's turn it is, until one finds no worker."""
        while (queue := self._queues.get(model)) is not None:
            head = queue.head()
            assert head is not None, "a queue without requests is dropped"
            entry = self._ledger.entries[head.request_id]
            demand = entry.demand
            able = self._fleet.able(model, demand)
            choice = self._policy.choose(able, demand, now_s)
            if choice is None and not able.decodes_any and self._fleet.serving(model).decodes_any:
                self._park(entry, head, now_s)
                continue
            if choice is None:
                if now_s >= self._recheck_s:
                    self._recheck_s = now_s + RECHECK_S
                    self._timers.watch(entry, self._recheck_s)
                return
            queue.charge(head)
            self.leave(entry)
            self._place(entry, choice, now_s)

    def _park(self, entry: Entry, head: Waiting, now_s: float) -> None:
        """All who could take it now are too small for it. Not begun, and too large for all known, it waits no more."""
        model = entry.admission.model
        self._take_out(entry)
        self._parked[entry.request_id] = (self._fleet.serving(model), head)
        if not entry.attempt and not self._fleet.could_decode(model, entry.demand):
            entry.patience_s = now_s
            self._timers.watch(entry, now_s)

    def _unpark(self) -> None:
        """Back to their old places, those whose workers are not the same any more."""
        for request_id, (roster, head) in list(self._parked.items()):
            model = self._ledger.entries[request_id].admission.model
            if self._fleet.serving(model) is not roster:
                del self._parked[request_id]
                self._put(model, head)

    def _place(self, entry: Entry, choice: Choice, now_s: float) -> None:
        entry.reset()
        entry.attempt += 1
        if not entry.generated:
            entry.stamps.dispatched_s = now_s
            entry.stamps.worker_queue_ms = 0.0
        _note_route(entry, choice, now_s)
        self.decisions[choice.reason or "prefill worker"] += 1
        local = choice.decode is not None and choice.prefill is None and choice.decode.info.role is Role.DECODE
        self._fleet.counsel.placed(entry.demand.prompt_tokens, local=local, now_s=now_s)
        if choice.prefill is None:
            assert choice.decode is not None, "a choice names a worker"
            self._begin_local(entry, choice.decode, choice, now_s)
        else:
            self._begin_prefill(entry, choice.prefill, choice.cached_tokens, now_s)

    def _begin_prefill(self, entry: Entry, view: WorkerView, cached_tokens: int, now_s: float) -> None:
        self._ledger.take_prefill(entry, view.key)
        entry.decode_name = ""
        entry.take_path("disaggregated")
        view.note(entry.request_id, now_s, max(entry.demand.prompt_tokens - cached_tokens, 1), 0, 0)
        view.breaker.sent(now_s)
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

    def _begin_local(self, entry: Entry, view: WorkerView, choice: Choice, now_s: float) -> None:
        self.local_prefills[choice.reason] += 1
        entry.local = True
        entry.take_path("mixed" if view.info.role is Role.MIXED else "local")
        entry.prefill_name = view.key.worker_id
        tokens = max(entry.demand.prompt_tokens - choice.cached_tokens, 1)
        self._take_decode(entry, view, now_s, prefill_tokens=tokens)
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
        demand = entry.demand
        blocks = view.blocks_for(demand.prompt_tokens + 1)
        view.note(entry.request_id, now_s, prefill_tokens, 1, blocks)
        view.bind(entry.request_id, demand.slo_tpot_ms, demand.expected_tokens)
        view.breaker.sent(now_s)
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


def _not_awaited(able: Roster, awaited: list[Roster]) -> list[WorkerView]:
    """Those of ``able`` that nobody who came before waits for."""
    if any(able is one for one in awaited):
        return []
    return [view for view in able if not any(view.key in one.members for one in awaited)]


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
