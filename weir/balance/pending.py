"""An action under way, judged by what is observed; and what failed lately is left alone. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weir.balance.decision import Action, Decision
from weir.balance.observe import Observation, WorkerFacts

MAX_DOUBLINGS = 5
MAX_KEPT = 4096


@dataclass(frozen=True, slots=True)
class Pending:
    """``known`` are the workers that were there when the decision was made."""

    decision: Decision
    known: frozenset[str]


def judge(pending: Pending, ready: Sequence[WorkerFacts], seen: Observation) -> str:
    """What became of it, in words that begin with ``done`` when it went well; empty while it is open."""
    decision = pending.decision
    present = {worker.worker_id: worker for worker in seen.workers}
    alive = {worker.worker_id for worker in ready}
    if decision.action is Action.SCALE_UP:
        new = sorted(alive - pending.known)
        return f"done, {new[0]} is ready" if new else ""
    if decision.action is Action.SCALE_DOWN:
        return "" if decision.worker_id in present else f"done, {decision.worker_id} is gone"
    lost = []
    for flip in decision.flips:
        worker = present.get(flip.worker_id)
        if worker is None:
            lost.append(f"{flip.worker_id} is gone")
        elif worker.epoch > flip.expected_epoch and worker.role is not flip.role:
            lost.append(f"{flip.worker_id} was made {worker.role.value} by someone else")
        elif worker.epoch < flip.expected_epoch:
            lost.append(f"{flip.worker_id} has restarted")
        elif worker.epoch == flip.expected_epoch or flip.worker_id not in alive:
            return ""
    return "; ".join(lost) if lost else "done, the new roles are seen"


class Penalties:
    """Who failed is not asked again for ``first_s``, doubled with each failure in a row; bounded in number."""

    def __init__(self, first_s: float) -> None:
        self._first_s = first_s
        self._failures: dict[str, int] = {}
        self._until_s: dict[str, float] = {}

    def note(self, key: str, well: bool, now_s: float) -> None:
        """An action on ``key`` ended."""
        if well:
            self._failures.pop(key, None)
            self._until_s.pop(key, None)
            return
        if len(self._failures) >= MAX_KEPT:
            self._failures.clear()
            self._until_s.clear()
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        self._until_s[key] = now_s + self._first_s * 2.0 ** min(failures, MAX_DOUBLINGS)

    def holds(self, key: str, now_s: float) -> bool:
        """Whether ``key`` is to be left alone now."""
        return now_s < self._until_s.get(key, now_s)
