"""Role changes as the operator and the balance loop ask for them: one at a time per worker, recorded, counted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from weir.clock import Clock
from weir.errors import WeirError
from weir.events.registry import Registry
from weir.lifecycle import Role
from weir.services.controller.ledger import RoleChange, RoleChangeDone, RoleLedger
from weir.services.controller.workers import RoleAnswer, WorkerPort
from weir.telemetry.logs import log
from weir.telemetry.metrics import ControllerMetrics

_log = logging.getLogger(__name__)


class RoleChanges:
    """``change`` one worker; ``drain`` waits for those under way."""

    def __init__(
        self,
        registry: Registry,
        ledger: RoleLedger,
        workers: WorkerPort,
        clock: Clock,
        metrics: ControllerMetrics,
        timeout_s: float,
    ) -> None:
        self.ledger = ledger
        self.on_made: Callable[[float], None] = lambda took_s: None
        """Called with the seconds that a change took."""
        self._registry = registry
        self._workers = workers
        self._clock = clock
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._running: set[asyncio.Task[RoleAnswer]] = set()

    async def change(self, worker_id: str, role: Role, *, expected_epoch: int, drain_ms: float) -> RoleAnswer:
        """Ask the worker; raises what it raises, and NotFound and FailedPrecondition before it is asked.

        The worker changes whether the caller waits or not; so does the record of it.
        """
        change = self.ledger.begin(self._registry.snapshot(), worker_id, role, expected_epoch=expected_epoch)
        task = asyncio.create_task(self._run(change, drain_ms), name=f"role of {worker_id}")
        self._running.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    async def drain(self) -> None:
        """Return when no change is under way."""
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _run(self, change: RoleChange, drain_ms: float) -> RoleAnswer:
        done: RoleChangeDone | None = None
        try:
            answer = await self._workers.set_role(
                change.address,
                change.role,
                expected_epoch=change.epoch,
                drain_timeout_ms=drain_ms,
                timeout_s=self._timeout_s + drain_ms / 1_000,
            )
            done = RoleChangeDone(change, answer.epoch, answer.took_ms, self._clock.unix_s())
            fields = {"worker": change.worker_id, "role": answer.role.value, "epoch": answer.epoch}
            log(_log, logging.INFO, "role changed", **fields, took_ms=answer.took_ms)
            self.on_made(answer.took_ms / 1e3)
            return answer
        except WeirError as error:
            fields = {"worker": change.worker_id, "role": change.role.value, "epoch": change.epoch}
            log(_log, logging.WARNING, "role not changed", **fields, error=error)
            raise
        finally:
            self._metrics.role_changes.labels("failed" if done is None else "made").inc()
            self.ledger.end(change, done)

    def _forget(self, task: asyncio.Task[RoleAnswer]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # told to the caller, or logged when the caller has left
