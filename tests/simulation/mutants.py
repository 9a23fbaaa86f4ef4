"""Bugs planted on purpose: each breaks one rule of the production code, and a schedule must notice.

``python -m tests.simulation.mutants`` writes the table of ``docs/simulation.md``.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.simulation.mutants_of_life import MUTANTS_OF_LIFE
from tests.simulation.plan import Fault, Plan
from tests.simulation.planting import Caught, Mutant, Planting, hunt
from weir.attempts.leg import RouterSession
from weir.engine.scheduler import Scheduler
from weir.errors import KvReadVoid
from weir.ids import RequestKey, WorkerKey
from weir.kvcache.pool import GuardTable
from weir.rpc.v1 import decode_pb2, prefill_pb2
from weir.services.decode.desk import DecodeDesk
from weir.services.decode.reads import Action, ReadResult, SequenceReads
from weir.services.prefill.desk import PrefillDesk, _Attempt
from weir.services.prefill.leg import PrefillLeg
from weir.services.router.commands import PublishCancel, SendBeginDecode, SendBeginPrefill, SendCancel, SendFirstToken
from weir.services.router.entry import Entry
from weir.services.router.events import LifecyclePublisher
from weir.services.router.ledger import Ledger
from weir.services.router.placing import Placing
from weir.services.router.router import Router
from weir.services.router.wire import BeginWriter
from weir.transfer import local, ticket
from weir.transfer.lease import LeaseEnd
from weir.transfer.local import LocalFabric, LocalTransfer
from weir.transfer.plan import Completion, Destination, ReadReport, merge_runs
from weir.transfer.ticket import BlockRef, GuardEntry, Ticket

# -- memory of the decode worker ------------------------------------------------------------------------


def _free_on_abort() -> Planting:
    return patch.object(Scheduler, "_quarantine", lambda self, sequence: None)


def _reads_go_on() -> Planting:
    """The decode desk tells the engine at once that no read lands any more."""
    close = SequenceReads.close

    def hasty(self: SequenceReads) -> list[Action]:
        from weir.services.decode.reads import ReadsDone

        return [*close(self), ReadsDone()] if self.started and not self.closed else close(self)

    return patch.object(SequenceReads, "close", hasty)


def _void_is_proven() -> Planting:
    def read_void(self: SequenceReads, read_id: int, void: KvReadVoid, now_s: float) -> list[Action]:
        return self.read_proven(read_id, ReadResult(0, 1, "none", 0.0, 0.0), now_s)

    return patch.object(SequenceReads, "read_void", read_void)


# -- the proof ------------------------------------------------------------------------------------------


def _no_guard() -> Planting:
    return patch.object(local, "prove", lambda refs, guards, checksums: None)


def _no_checksum() -> Planting:
    prove = ticket.prove
    return patch.object(local, "prove", lambda refs, guards, checksums: prove(refs, guards, None))


def _no_generation() -> Planting:
    prove = ticket.prove

    def by_checksum(refs: Sequence[BlockRef], guards: Sequence[GuardEntry], checksums: Sequence[int] | None) -> None:
        found = [BlockRef(ref.block, guard.generation) for ref, guard in zip(refs, guards, strict=True)]
        prove(found, guards, checksums)

    return patch.object(local, "prove", by_checksum)


def _guard_before_data() -> Planting:
    async def _read(self: Any, promise: Ticket, pairs: Sequence[Destination], notify: bool) -> ReadReport:
        faults, owner = self._fabric.faults, self._fabric.owner(promise.source)
        guards = owner.pool.guard.entries(ref.block for ref, _ in pairs)
        await asyncio.sleep(faults.before_data_s(promise))
        runs = merge_runs([(ref.block, block) for ref, block in pairs], block_bytes=self.pool.layout.block_bytes)
        for run in runs:
            await asyncio.sleep(faults.per_run_s(promise))
            self._copy(promise, run)
        ticket.prove([ref for ref, _ in pairs], guards, None)
        done = Completion(promise.lease_id, promise.key)
        if notify and faults.notification(done):
            owner._complete(done)
        return ReadReport(1, len(pairs), len(runs), "local", 0.0, 0.0, 0.0, 0.0, 0.0)

    return patch.object(LocalTransfer, "_read", _read)


def _same_generation() -> Planting:
    def invalidate(self: GuardTable, block: int) -> None:
        self.array[block, 1] = 0

    return patch.object(GuardTable, "invalidate", invalidate)


def _any_incarnation() -> Planting:
    """A worker is whoever answers at its address."""

    def owner(self: LocalFabric, worker: WorkerKey) -> LocalTransfer:
        for key, transfer in self._alive.items():
            if key.worker_id == worker.worker_id:
                return transfer
        raise KvReadVoid("transport", "not reachable")

    return patch.object(LocalFabric, "owner", owner)


def _quick_restarts(plan: Plan) -> None:
    from dataclasses import replace

    sources = [worker.name for worker in plan.workers if worker.role.value == "prefill"] or [plan.workers[0].name]
    plan.slow_reads, plan.slow_read_s, plan.read_timeout_s = 0.7, 0.5, 1.5
    plan.faults = [
        replace(fault, what="kill", who=sources[index % len(sources)], for_s=0.01)
        for index, fault in enumerate(plan.faults)
    ]


def _late_news(plan: Plan) -> None:
    """Reads fail, and the network is slower than the back-off."""
    plan.slow_reads, plan.slow_read_s, plan.read_timeout_s, plan.spikes = 0.6, 4.0, 0.3, 0.5


def _router_dies_early(plan: Plan) -> None:
    plan.faults = [Fault(0.5, "kill", f"router{number}", 1.0) for number in range(plan.routers)]


# -- leases ---------------------------------------------------------------------------------------------


def _ends_twice() -> Planting:
    def _end_lease(self: PrefillDesk, attempt: _Attempt, reason: LeaseEnd) -> None:
        if attempt.lease_id:
            self.leases.end(attempt.lease_id, reason)
            attempt.lease_id = 0  # but a late completion still finds it

    return patch.object(PrefillDesk, "_end_lease", _end_lease)


def _never_lapses() -> Planting:
    return patch.object(PrefillDesk, "expire", lambda self, now_unix_s: None)


def _session_loss_ignored() -> Planting:
    def lose(self: PrefillLeg, session: RouterSession) -> None:
        session.end()
        if self._sessions.pop(session.name, None) is not None:
            self.desk.drop_news(session.name)

    return patch.object(PrefillLeg, "lose", lose)


def _foreign_release() -> Planting:
    """A completion ends the lease of that number, whoever's it is."""

    def release(self: PrefillDesk, key: RequestKey, lease_id: int) -> None:
        for other in list(self._by_lease):
            self.lease_read(other)

    return patch.object(PrefillDesk, "release", release)


# -- identity and attempts ------------------------------------------------------------------------------


def _attempt_ignored() -> Planting:
    def on_leg(self: Ledger, request_id: str, attempt: int, worker: WorkerKey, *, prefill: bool) -> Entry | None:
        entry = self.entries.get(request_id)
        if entry is not None and worker == (entry.prefill if prefill else entry.decode):
            return entry
        return None

    return patch.object(Ledger, "on_leg", on_leg)


def _same_attempt() -> Planting:
    place = Placing._place

    def _place(self: Placing, entry: Entry, *rest: Any) -> None:
        entry.attempt -= entry.attempt > 0
        place(self, entry, *rest)

    return patch.object(Placing, "_place", _place)


def _cancels_newer() -> Planting:
    def cancel(self: DecodeDesk, request_id: str, attempt: int, reason: str = "") -> None:
        from weir.attempts.desk import AttemptOver

        for one in list(self._by_request.get(request_id, {}).values()):
            self._close(one, AttemptOver(one.key, "CANCELLED", "cancelled"))

    return patch.object(DecodeDesk, "cancel", cancel)


# -- going on elsewhere ---------------------------------------------------------------------------------


@contextlib.contextmanager
def _begins(change: Callable[[Any, int], None]) -> Iterator[None]:
    """``change(message, attempt)`` both begin messages."""
    prefill, decode = BeginWriter.prefill, BeginWriter.decode

    def begin_prefill(self: BeginWriter, command: SendBeginPrefill) -> prefill_pb2.BeginPrefill:
        message = prefill(self, command)
        change(message, command.attempt)
        return message

    def begin_decode(self: BeginWriter, command: SendBeginDecode, source: Any) -> decode_pb2.BeginDecode:
        message = decode(self, command, source)
        change(message, command.attempt)
        return message

    with patch.object(BeginWriter, "prefill", begin_prefill), patch.object(BeginWriter, "decode", begin_decode):
        yield


def _seed_lost() -> Planting:
    def change(message: Any, attempt: int) -> None:
        message.sampling.seed += attempt > 1

    return _begins(change)


def _tokens_forgotten() -> Planting:
    return _begins(lambda message, attempt: message.ClearField("generated_token_ids"))


def _tokens_as_prompt() -> Planting:
    def change(message: Any, attempt: int) -> None:
        message.prompt_token_ids.extend(message.generated_token_ids)
        message.ClearField("generated_token_ids")

    return _begins(change)


def _first_token_not_passed_on() -> Planting:
    send = Router._send_first_token

    def late(self: Router, command: SendFirstToken) -> None:
        entry = next((e for e in self._book.entries() if e.first_token is command.token), None)
        if entry is None or entry.failures == 0:
            send(self, command)

    return patch.object(Router, "_send_first_token", late)


# -- cancelling and liveness ----------------------------------------------------------------------------


@contextlib.contextmanager
def _cancel_not_forwarded() -> Iterator[None]:
    send = Router._send_cancel

    def only_prefill(self: Router, command: SendCancel) -> None:
        if command.prefill:
            send(self, command)

    async def silent(self: LifecyclePublisher, command: PublishCancel) -> None:
        return None

    with patch.object(Router, "_send_cancel", only_prefill), patch.object(LifecyclePublisher, "_send_cancel", silent):
        yield


def _bound_too_early() -> Planting:
    """Room on D is held for prompts that P has not begun."""
    begin = Placing._begin_prefill

    def _begin_prefill(self: Placing, entry: Entry, *rest: Any) -> None:
        begin(self, entry, *rest)
        self._ledger.prefill_begun(entry)

    return patch.object(Placing, "_begin_prefill", _begin_prefill)


def _keys_not_ordered() -> Planting:
    def unknown(self: RequestKey, other: object) -> Any:
        return NotImplemented

    return patch.multiple(RequestKey, __lt__=unknown, __gt__=unknown)


MUTANTS = [
    Mutant("free on abort", "D frees blocks that a read can still land on", _free_on_abort, ["churn"]),
    Mutant("reads forgotten", "D takes reads for done once they are aborted", _reads_go_on, ["churn"]),
    Mutant("void is proven", "a void read counts as arrived", _void_is_proven, ["churn"]),
    Mutant("no guard", "a read is not proven at all", _no_guard, ["churn"]),
    Mutant("no checksum", "bytes are not compared with what was sealed", _no_checksum, ["reads"]),
    Mutant("no generation", "a block's generation is not compared with the ticket's", _no_generation, ["churn"]),
    Mutant("guard before data", "the guard is read before the data", _guard_before_data, ["churn"]),
    Mutant("same generation", "the generation stays when a block is handed out anew", _same_generation, ["calm"]),
    Mutant(
        "any incarnation",
        "a restarted worker is read from as if it were the old one",
        _any_incarnation,
        ["deaths"],
        _quick_restarts,
    ),
    Mutant("lease ends twice", "a late completion finds an ended lease", _ends_twice, ["leaving", "leases"]),
    Mutant("foreign release", "a completion ends another request's lease", _foreign_release, ["calm"]),
    Mutant("lease never lapses", "a lease outlives its deadline", _never_lapses, ["churn"]),
    Mutant(
        "session loss ignored",
        "P keeps what a dead router left behind",
        _session_loss_ignored,
        ["routers"],
        _router_dies_early,
    ),
    Mutant("attempt ignored", "the router takes news of older attempts", _attempt_ignored, ["reads"], _late_news),
    Mutant("same attempt", "a retry has the number of the attempt before", _same_attempt, ["deaths", "leases"]),
    Mutant("cancels newer", "a late cancel stops the next attempt too", _cancels_newer, ["deaths", "leases"]),
    Mutant("seed lost", "a resumed request has another random stream", _seed_lost, ["deaths"]),
    Mutant("tokens forgotten", "a resumed request starts from its prompt alone", _tokens_forgotten, ["deaths"]),
    Mutant("tokens as prompt", "tokens already sent are resumed as part of the prompt", _tokens_as_prompt, ["deaths"]),
    Mutant("first token lost", "a second D is not told the first token", _first_token_not_passed_on, ["decode deaths"]),
    Mutant("cancel not forwarded", "D does not hear that the client left", _cancel_not_forwarded, ["leaving"]),
    Mutant("bound too early", "room on D is held before P has begun", _bound_too_early, ["calm"]),
    Mutant("keys not ordered", "two requests of one deadline cannot be compared", _keys_not_ordered, ["calm"]),
    *MUTANTS_OF_LIFE,
]

TABLE_MARK = "<!-- table -->"


def table(caught: Sequence[Caught]) -> str:
    """The results as Markdown."""
    lines = ["| planted bug | what it does | caught by | schedules |", "|---|---|---|---|"]
    for one in caught:
        took = "not caught" if one.schedules is None else str(one.schedules)
        lines.append(f"| {one.mutant.name} | {one.mutant.what} | {one.checker} | {took} |")
    return "\n".join(lines)


def main() -> int:
    """Hunt all of them, or those named; without names the table in docs/simulation.md is written."""
    names = sys.argv[1:]
    results = []
    for mutant in MUTANTS:
        if not names or mutant.name in names:
            found = hunt(mutant, 60)
            results.append(found)
            print(f"{mutant.name}: {found.schedules} schedules, {found.checker}: {found.how[:150]}", flush=True)
    if not names:
        path = Path(__file__).parents[2] / "docs" / "simulation.md"
        before, _, rest = path.read_text().partition(TABLE_MARK)
        after = rest.partition(TABLE_MARK)[2]
        path.write_text(f"{before}{TABLE_MARK}\n{table(results)}\n{TABLE_MARK}{after}")
    return int(any(found.schedules is None for found in results))


if __name__ == "__main__":
    sys.exit(main())
