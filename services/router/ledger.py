"""Who holds what of every request: entries, legs, and the commands that follow from changing them. Pure.

This is bookkeeping without decisions; ``book`` and ``placing`` decide. A leg is taken by ``take_*`` and given up
by ``unlink_*``; only ``drop_legs`` and ``release`` tell the worker, so whoever unlinks otherwise knows that the
worker has nothing left.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from weir.errors import WeirError
from weir.ids import WorkerKey
from weir.lifecycle import FinishReason, RequestState, check_transition
from weir.services.router.commands import (
    Admission,
    Command,
    PublishState,
    SendCancel,
    SendRelease,
)
from weir.services.router.ending import end_of
from weir.services.router.entry import NEVER_S, Entry
from weir.services.router.fleet import Fleet


class Ledger:
    """See the module."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.commands: list[Command] = []
        self.entries: dict[str, Entry] = {}
        self.legs: dict[WorkerKey, set[str]] = {}
        self.unbound: dict[str, None] = {}
        """Requests whose prefill has begun, without a decode worker, in the order in which they became so."""
        self.ended: Counter[str] = Counter()
        self.tenants: Counter[str] = Counter()
        """Requests under way or waiting, by tenant."""
        self.stale_facts = 0

    def check_integrity(self) -> None:
        """Assert that the indices agree with the entries."""
        legs = {(worker, request_id) for worker, ids in self.legs.items() for request_id in ids}
        held = {
            (worker, entry.request_id)
            for entry in self.entries.values()
            for worker in (entry.prefill, entry.decode)
            if worker is not None
        }
        assert legs == held, "legs and entries differ"
        assert set(self.unbound) == {e.request_id for e in self.entries.values() if e.awaits_decode}
        assert Counter(entry.admission.tenant for entry in self.entries.values()) == self.tenants
        assert all(e.state is not RequestState.RECEIVED for e in self.entries.values())

    def open(self, entry: Entry) -> None:
        """A request is under way."""
        self.entries[entry.request_id] = entry
        self.tenants[entry.admission.tenant] += 1

    def close(self, entry: Entry) -> None:
        """Forget a request."""
        del self.entries[entry.request_id]
        tenant = entry.admission.tenant
        self.tenants[tenant] -= 1
        if not self.tenants[tenant]:
            del self.tenants[tenant]

    # legs

    def on_leg(self, request_id: str, attempt: int, worker: WorkerKey, *, prefill: bool) -> Entry | None:
        """The entry if this attempt of it has that leg on ``worker``; else None, counted as stale."""
        entry = self.entries.get(request_id)
        if entry is not None and entry.attempt == attempt:
            leg = entry.prefill if prefill else entry.decode
            if leg is worker or leg == worker:
                return entry
        self.stale_facts += 1
        return None

    def take_prefill(self, entry: Entry, worker: WorkerKey) -> None:
        """``worker`` prefills ``entry``."""
        assert entry.prefill is None, "one prefill leg at a time"
        entry.prefill = worker
        entry.prefill_name = worker.worker_id
        self.legs.setdefault(worker, set()).add(entry.request_id)
        self._index_unbound(entry)

    def take_decode(self, entry: Entry, worker: WorkerKey) -> None:
        """``worker`` decodes ``entry``."""
        assert entry.decode is None, "one decode leg at a time"
        entry.decode = worker
        entry.decode_name = worker.worker_id
        self.legs.setdefault(worker, set()).add(entry.request_id)
        self._index_unbound(entry)

    def prefill_begun(self, entry: Entry) -> None:
        """P has the prompt's blocks: from now on its KV comes by computing alone."""
        entry.prefill_started = True
        self._index_unbound(entry)

    def unlink_prefill(self, entry: Entry) -> None:
        """Nothing of ``entry`` is, or will be, on its prefill worker."""
        worker, entry.prefill = entry.prefill, None
        self._unlink(worker, entry)

    def unlink_decode(self, entry: Entry) -> None:
        """Nothing of ``entry`` is, or will be, on its decode worker."""
        worker, entry.decode = entry.decode, None
        if worker is not None:
            self._fleet.unbind(worker, entry.request_id)
        self._unlink(worker, entry)

    def _unlink(self, worker: WorkerKey | None, entry: Entry) -> None:
        assert worker is not None, "a leg is given up once"
        self._index_unbound(entry)
        if worker in (entry.prefill, entry.decode):
            return
        self._fleet.settle(worker, entry.request_id)
        ids = self.legs[worker]
        ids.remove(entry.request_id)
        if not ids:
            del self.legs[worker]

    def _index_unbound(self, entry: Entry) -> None:
        if entry.awaits_decode:
            self.unbound.setdefault(entry.request_id, None)
        else:
            self.unbound.pop(entry.request_id, None)

    def drop_legs(self, entry: Entry, reason: str) -> None:
        """Cancel what is still under way for this attempt, on both legs."""
        key = (entry.request_id, entry.attempt)
        if entry.prefill is not None:
            self.commands.append(SendCancel(entry.prefill, True, *key, reason))
            self.unlink_prefill(entry)
        if entry.decode is not None:
            self.commands.append(SendCancel(entry.decode, False, *key, reason))
            self.unlink_decode(entry)
        entry.read_until_s = NEVER_S

    def drop_decode(self, entry: Entry, reason: str) -> None:
        """Cancel what D has of this attempt; the prefill leg stays."""
        assert entry.decode is not None
        self.commands.append(SendCancel(entry.decode, False, entry.request_id, entry.attempt, reason))
        entry.dropped |= {entry.decode}
        self.unlink_decode(entry)
        entry.read_until_s = NEVER_S

    def release(self, entry: Entry) -> None:
        """Tell P that the KV is needed no more, if it has announced any. It may still owe the first token."""
        assert entry.prefill is not None
        if entry.lease_id and not entry.released:
            entry.released = True
            self.commands.append(SendRelease(entry.prefill, entry.request_id, entry.attempt, entry.lease_id))

    def end_prefill(self, entry: Entry, reason: str) -> None:
        """P has nothing more to do for this attempt: release its lease; cancel when none is known."""
        self.release(entry)
        if not entry.released:
            assert entry.prefill is not None
            self.commands.append(SendCancel(entry.prefill, True, entry.request_id, entry.attempt, reason))
        self.unlink_prefill(entry)

    # states

    def enter(
        self,
        entry: Entry,
        state: RequestState,
        now_s: float,
        *,
        error: WeirError | None = None,
        ttft_ms: float = 0.0,
        tpot_ms: float = 0.0,
    ) -> None:
        """Change the state and tell the world."""
        check_transition(entry.state, state)
        entry.state = state
        if state is RequestState.TRANSFERRING:
            entry.transferring_s = now_s
        admission = entry.admission
        decoding = state is RequestState.DECODING or state is RequestState.FINISHED
        self.commands.append(
            PublishState(
                request_id=admission.request_id,
                attempt=entry.attempt,
                state=state,
                worker_id=entry.decode_name if decoding else entry.prefill_name,
                model=admission.model,
                tenant=admission.tenant,
                prompt_tokens=len(admission.prompt),
                completion_tokens=len(entry.generated),
                cached_tokens=entry.cached_tokens,
                age_ms=(now_s - admission.received_s) * 1e3,
                error="" if error is None else str(error)[:500],
                ttft_ms=ttft_ms,
                tpot_ms=tpot_ms,
                traceparent=admission.traceparent,
            )
        )

    def end(
        self,
        entry: Entry,
        now_s: float,
        state: RequestState,
        reason: FinishReason,
        *,
        error: WeirError | None = None,
        stop_string: str = "",
        usage: Any | None = None,
    ) -> None:
        """The last word about ``entry``: its legs are told, it is forgotten."""
        self.drop_legs(entry, "finished" if error is None else str(error)[:200])
        self.close(entry)
        end = end_of(entry, now_s, state, reason, error, stop_string, usage)
        self.commands.append(end)
        self.ended[state.value] += 1
        ttft_ms, tpot_ms = end.timings.ttft_ms, end.timings.tpot_ms
        self.enter(entry, state, now_s, error=error, ttft_ms=ttft_ms, tpot_ms=tpot_ms)

    def reject(self, admission: Admission, error: WeirError, now_s: float) -> None:
        """Note that a request was refused at the door, before it had an entry."""
        self.ended[RequestState.REJECTED.value] += 1
        self.commands.append(
            PublishState(
                request_id=admission.request_id,
                attempt=0,
                state=RequestState.REJECTED,
                worker_id="",
                model=admission.model,
                tenant=admission.tenant,
                prompt_tokens=len(admission.prompt),
                completion_tokens=0,
                cached_tokens=0,
                age_ms=(now_s - admission.received_s) * 1e3,
                error=str(error)[:500],
                traceparent=admission.traceparent,
            )
        )
