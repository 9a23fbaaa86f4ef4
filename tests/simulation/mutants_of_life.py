"""Planted bugs, continued: processes that stop, steps that fail, roles, weights, sizes, tenants."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from tests.simulation.plan import Fault, Plan
from tests.simulation.planting import Mutant, Planting
from weir.balance.decide import BalanceController
from weir.balance.decision import Decision
from weir.balance.observe import Observation
from weir.engine.engine import Engine
from weir.engine.scheduler import Plan as StepPlan
from weir.errors import WeirError
from weir.kvcache.blocks import BlockManager
from weir.lifecycle import RequestState, Role
from weir.services.prefill.desk import PrefillDesk
from weir.services.router.book import RequestBook
from weir.services.router.entry import Entry
from weir.services.router.fleet import Fleet
from weir.services.router.policy import Demand
from weir.services.router.queue import FairQueue, Waiting
from weir.services.router.recovery import Recovery
from weir.services.router.roster import Roster
from weir.services.router.router import Router
from weir.services.worker.announcer import Announcer
from weir.services.worker.host import WorkerHost
from weir.services.worker.role_gate import RoleGate

# -- stopping -------------------------------------------------------------------------------------------


def _drain_forgets() -> Planting:
    async def settle(self: WorkerHost, *args: Any) -> None:
        return None

    return patch.object(WorkerHost, "_settle", settle)


def _stays_listed() -> Planting:
    async def stop(self: Announcer) -> None:
        for task in self._tasks:
            task.cancel()

    return patch.object(Announcer, "stop", stop)


def _router_cuts_off() -> Planting:
    async def drain(self: Router) -> None:
        self._refusing = "the router is draining"

    return patch.object(Router, "drain", drain)


# -- steps that fail ------------------------------------------------------------------------------------


def _failed_step_leaves_blocks() -> Planting:
    fail = Engine._fail

    def _fail(self: Engine, plan: StepPlan, error: Exception) -> None:
        with patch.object(BlockManager, "release", lambda self, blocks: None):
            fail(self, plan, error)

    return patch.object(Engine, "_fail", _fail)


def _dead_engine_keeps_attempts() -> Planting:
    return patch.object(PrefillDesk, "engine_lost", lambda self, error: None)


# -- sizes, weights, tenants ----------------------------------------------------------------------------


@contextlib.contextmanager
def _too_large_is_fatal() -> Iterator[None]:
    """A router that does not look at sizes, and takes one worker's no for everybody's."""

    def too_large(self: Recovery, entry: Entry, worker: object, prefill: bool, error: WeirError, now_s: float) -> None:
        self.fail(entry, now_s, error, RequestState.FAILED)

    def able(self: Fleet, model: str, demand: Demand) -> Roster:
        return self.serving(model)

    with patch.object(Recovery, "too_large", too_large), patch.object(Fleet, "able", able):
        yield


def _door_lets_all_in() -> Planting:
    return patch.multiple(Fleet, token_limit=lambda self, model: 0, could_decode=lambda self, model, demand: True)


def _weights_mixed() -> Planting:
    return patch.object(Roster, "of_revision", lambda self, revision: self)


def _tenants_unbounded() -> Planting:
    return patch.object(RequestBook, "_check_tenant", lambda self, admission, now_s: None)


def _lowest_first() -> Planting:
    def head(self: FairQueue) -> Waiting | None:
        while self._levels:
            priority = min(self._levels)
            found = self._turn(self._levels[priority])
            if found is not None:
                return found
            del self._levels[priority]
        return None

    return patch.object(FairQueue, "head", head)


# -- roles ----------------------------------------------------------------------------------------------


def _stale_epoch() -> Planting:
    begin = RoleGate.begin_change

    def begin_change(self: RoleGate, role: Role, expected_epoch: int) -> None:
        begin(self, role, self.epoch)

    return patch.object(RoleGate, "begin_change", begin_change)


def _pending_forgotten() -> Planting:
    step = BalanceController.step

    def forgetful(self: BalanceController, seen: Observation, now_s: float) -> Decision:
        decision = step(self, seen, now_s)
        self.pending = None
        return decision

    return patch.object(BalanceController, "step", forgetful)


def _long_work(plan: Plan) -> None:
    """Answers take longer than open calls are given at the end."""
    plan.step_s = 0.6
    plan.faults = [Fault(0.6, "terminate", f"router{number}", 1.0) for number in range(plan.routers)]


def _many_hands(plan: Plan) -> None:
    """Operators in a hurry, on a network that is slower than they are."""
    plan.spikes = 0.5
    worker = plan.workers[-1].name
    for number in range(40):
        role = (Role.PREFILL, Role.DECODE, Role.MIXED)[number % 3]
        plan.faults.append(Fault(0.5 + 0.05 * number, "flip", worker, 3.0, role.value))


MUTANTS_OF_LIFE = [
    Mutant("drain forgets", "a worker that stops does not wait for what runs", _drain_forgets, ["drains"]),
    Mutant("stays listed", "a worker that has stopped stays in the registry", _stays_listed, ["drains"]),
    Mutant("cut off", "a router that stops does not wait for its requests", _router_cuts_off, ["drains"], _long_work),
    Mutant("failed step leaks", "a failed step leaves its sequences' blocks", _failed_step_leaves_blocks, ["steps"]),
    Mutant("dead engine", "P forgets its attempts when its engine dies", _dead_engine_keeps_attempts, ["steps"]),
    Mutant("too large is fatal", "one worker's no is taken for everybody's", _too_large_is_fatal, ["sizes"]),
    Mutant("door lets all in", "what no worker can hold is not refused", _door_lets_all_in, ["sizes"]),
    Mutant("weights mixed", "an answer is gone on with by other weights", _weights_mixed, ["weights"]),
    Mutant("tenants unbounded", "a tenant may have as much as it likes", _tenants_unbounded, ["tenants"]),
    Mutant("lowest first", "the lowest priority is served first", _lowest_first, ["tenants"]),
    Mutant("stale epoch", "a worker changes its role whatever its epoch", _stale_epoch, ["balance"], _many_hands),
    Mutant("pending forgotten", "the controller acts again before it has seen", _pending_forgotten, ["balance"]),
]
