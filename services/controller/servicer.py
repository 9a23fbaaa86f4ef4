"""ControllerService: converts and delegates."""

from __future__ import annotations

import math
from typing import Any

import grpc.aio

from weir.clock import Clock
from weir.errors import FailedPrecondition, InvalidArgument
from weir.events.registry import Registry
from weir.rpc.convert import role_from_pb, role_to_pb
from weir.rpc.v1 import controller_pb2, controller_pb2_grpc
from weir.services.controller.ledger import RoleLedger
from weir.services.controller.loop import BalanceLoop
from weir.services.controller.roles import RoleChanges
from weir.services.controller.workers import WorkerPort
from weir.telemetry.metrics import ControllerMetrics

SERVICE_NAME = "weir.rpc.v1.ControllerService"

Context = grpc.aio.ServicerContext[Any, Any]


class ControllerServicer(controller_pb2_grpc.ControllerServiceServicer):
    """Answers from the registry's view; changes roles one at a time per worker. ``balance`` None: the mode is off."""

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
        self.changes = RoleChanges(registry, ledger, workers, clock, metrics, role_change_timeout_s)
        self.balance: BalanceLoop | None = None
        self._registry = registry

    async def ListMembers(
        self, request: controller_pb2.ListMembersRequest, context: Context
    ) -> controller_pb2.ListMembersResponse:
        """The view now, by worker id."""
        members = self._registry.snapshot()
        return controller_pb2.ListMembersResponse(
            members=[members[worker_id] for worker_id in sorted(members)],
            stale=self._registry.stale,
            role_changes=self.changes.ledger.made,
        )

    async def SetWorkerRole(
        self, request: controller_pb2.SetWorkerRoleRequest, context: Context
    ) -> controller_pb2.SetWorkerRoleResponse:
        """Ask the worker; what it raises is what the caller gets."""
        role = role_from_pb(request.role)
        drain_ms = request.drain_timeout_ms
        if not (math.isfinite(drain_ms) and drain_ms >= 0):
            raise InvalidArgument("drain_timeout_ms", drain_ms, "must be at least 0")
        answer = await self.changes.change(
            request.worker_id, role, expected_epoch=request.expected_epoch, drain_ms=drain_ms
        )
        return controller_pb2.SetWorkerRoleResponse(
            role=role_to_pb(answer.role), role_epoch=answer.epoch, took_ms=answer.took_ms
        )

    async def ListDecisions(
        self, request: controller_pb2.ListDecisionsRequest, context: Context
    ) -> controller_pb2.ListDecisionsResponse:
        """The decisions that are kept, oldest first."""
        if request.limit < 0:
            raise InvalidArgument("limit", request.limit, "must be at least 0")
        if self.balance is None:
            return controller_pb2.ListDecisionsResponse(mode="off")
        log = self.balance.decisions
        kept = list(log.kept)[-request.limit :] if request.limit else list(log.kept)
        mode = "advise" if self.balance.dry_run else "auto"
        return controller_pb2.ListDecisionsResponse(
            decisions=kept, latest=log.latest, mode=mode, pending=self.balance.pending
        )

    async def CancelDecision(
        self, request: controller_pb2.CancelDecisionRequest, context: Context
    ) -> controller_pb2.CancelDecisionResponse:
        """Give up what is pending."""
        if self.balance is None:
            raise FailedPrecondition("the balance is off: nothing is pending")
        await self.balance.cancel(request.number)
        return controller_pb2.CancelDecisionResponse()

    async def drain(self) -> None:
        """Return when no change is under way."""
        await self.changes.drain()
