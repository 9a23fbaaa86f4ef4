"""What must hold for roles: who may change one, from which epoch, and how often the controller may want to."""

from __future__ import annotations

import contextvars
from typing import TYPE_CHECKING

from weir.balance.decide import BalanceController
from weir.balance.decision import Decision
from weir.config import ControllerConfig
from weir.lifecycle import Role
from weir.services.worker.host import WorkerHost

if TYPE_CHECKING:
    from tests.simulation.world import World

BY_HAND: contextvars.ContextVar[bool] = contextvars.ContextVar("by_hand", default=False)
"""Whether an operator asks, and not the balance loop."""
REPAIRS = "no worker is left"
"""In the reasons of decisions that need not wait."""


class RoleChecks:
    """Told what the controller decides and asks, and what workers do."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._config: ControllerConfig | None = None
        self._controller: BalanceController | None = None
        self._was_pending = False
        self._ended_s = float("-inf")
        self._last: Role | None = None

    def begun(self, config: ControllerConfig) -> None:
        """A controller starts, and knows nothing of what was before."""
        self._config = config
        self._controller = None
        self._was_pending = False
        self._ended_s = float("-inf")
        self._last = None

    def decided(self, controller: BalanceController, decision: Decision) -> None:
        """A round of the loop. Turning back takes its time."""
        assert self._config is not None
        checks, now_s = self._world.checks, self._world.loop.time()
        self._controller = controller
        if self._was_pending and (controller.pending is None or decision.action.lasting):
            self._ended_s = now_s
        if decision.action.lasting:
            checks.counts["decisions"] += 1
            self._world.history.note("balance", f"{decision.action.value} {decision.flips}: {decision.reason}")
            role = decision.flips[0].role if decision.flips else None
            early_s = self._ended_s + self._config.cooldown_s - self._config.interval_s - now_s
            if REPAIRS not in decision.reason and role is not self._last and early_s > 0:
                checks.fail("flapping", f"decision {decision.number} comes {early_s:.3f} s early: {decision.reason}")
            self._last = role
        self._was_pending = controller.pending is not None

    def asked(self, worker: str, role: Role, epoch: int) -> None:
        """A worker is about to be asked for a role: by an operator, or as decided and still wanted."""
        if BY_HAND.get() or self._controller is None:
            return
        pending = self._controller.pending
        flips = () if pending is None else pending.decision.flips
        if (worker, role, epoch) not in [(flip.worker_id, flip.role, flip.expected_epoch) for flip in flips]:
            self._world.checks.fail("roles", f"{worker} is asked to be {role.value} at epoch {epoch}, decided: {flips}")

    def changed(self, worker: WorkerHost, expected_epoch: int, before: tuple[int, Role], role: Role) -> None:
        """A worker has done what it was asked: from the epoch that was meant, and from no other."""
        gate, (epoch, was) = worker.gate, before
        if gate.epoch == epoch and was is role:
            return
        self._world.checks.counts["flips"] += 1
        if expected_epoch != epoch:
            what = f"{worker.key} became {role.value} at epoch {epoch}, it was asked at epoch {expected_epoch}"
            self._world.checks.fail("epoch", what)

    def capable(self) -> bool:
        """Whether somebody prefills and somebody decodes."""
        hosts = [node.worker for node in self._world.workers.values() if node.worker is not None]
        roles = [host.gate.role for host in hosts]
        return any(role.prefills for role in roles) and any(role.decodes for role in roles)

    def at_the_end(self) -> None:
        """A controller that balances has made the cluster whole again."""
        if self._world.plan.balance is not None and not self.capable():
            self._world.checks.fail("roles", "nobody prefills, or nobody decodes, in the end")
