"""ControllerService: converts and delegates."""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Any

import grpc.aio

from weir.clock import Clock
from weir.errors import InvalidArgument, WeirError
from weir.events.registry import Registry
from weir.rpc.convert import role_from_pb, role_to_pb
from weir.rpc.v1 import controller_pb2, controller_pb2_grpc
from weir.services.controller.ledger import RoleChange, RoleChangeDone, RoleLedger
from weir.services.controller.workers import RoleAnswer, WorkerPort
from weir.telemetry.logs import log
from weir.telemetry.metrics import ControllerMetrics

_log = logging.getLogger(__name__)

SERVICE_NAME = "weir.rpc.v1.ControllerService"

Context = grpc.aio.ServicerContext[Any, Any]


class ControllerServicer(controller_pb2_grpc.ControllerServiceServicer):
    """Answers from the registry's view; changes roles one at a time per worker."""

    def __init__(
        self,
        *,
        registry: Registry,
        ledger: RoleLedger,
        workers: WorkerPort,
        clock: Clock,
        metrics: ControllerMetrics,
        role_change_timeout_s: float,
    ) -> None:
        self._registry = registry
        self._ledger = ledger
        self._workers = workers
        self._clock = clock
        self._metrics = metrics
        self._timeout_s = role_change_timeout_s
        self._changes: set[asyncio.Task[RoleAnswer]] = set()

    async def ListMembers(
        self, request: controller_pb2.ListMembersRequest, context: Context
    ) -> controller_pb2.ListMembersResponse:
        """The view now, by worker id."""
        members = self._registry.snapshot()
        return controller_pb2.ListMembersResponse(
            members=[members[worker_id] for worker_id in sorted(members)],
            stale=self._registry.stale,
            role_changes=self._ledger.made,
        )

    async def SetWorkerRole(
        self, request: controller_pb2.SetWorkerRoleRequest, context: Context
    ) -> controller_pb2.SetWorkerRoleResponse:
        """Ask the worker; what it raises is what the caller gets."""
        role = role_from_pb(request.role)
        drain_ms = request.drain_timeout_ms
        if not (math.isfinite(drain_ms) and drain_ms >= 0):
            raise InvalidArgument("drain_timeout_ms", drain_ms, "must be at least 0")
        change = self._ledger.begin(
            self._registry.snapshot(), request.worker_id, role, expected_epoch=request.expected_epoch
        )
        # The worker changes whether the caller waits or not; so does the record of it.
        task = asyncio.create_task(self._change(change, drain_ms))
        self._changes.add(task)
        task.add_done_callback(self._forget)
        answer = await asyncio.shield(task)
        return controller_pb2.SetWorkerRoleResponse(
            role=role_to_pb(answer.role), role_epoch=answer.epoch, took_ms=answer.took_ms
        )

    async def drain(self) -> None:
        """Return when no change is under way."""
        await asyncio.gather(*self._changes, return_exceptions=True)

    async def _change(self, change: RoleChange, drain_ms: float) -> RoleAnswer:
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
            return answer
        except WeirError as error:
            fields = {"worker": change.worker_id, "role": change.role.value, "epoch": change.epoch}
            log(_log, logging.WARNING, "role not changed", **fields, error=error)
            raise
        finally:
            self._metrics.role_changes.labels("failed" if done is None else "made").inc()
            self._ledger.end(change, done)

    def _forget(self, task: asyncio.Task[RoleAnswer]) -> None:
        self._changes.discard(task)
        if not task.cancelled():
            task.exception()  # told to the caller, or logged when the caller has left
