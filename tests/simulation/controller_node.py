"""The controller as a process of the cluster: its service, and, in some schedules, the balance loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from tests.simulation.broker import SimBus, SimRegistry
from tests.simulation.nodes import Node
from tests.simulation.role_checks import BY_HAND
from tests.simulation.virtual_time import Process
from weir.balance.decision import Decision
from weir.balance.observe import Observation
from weir.config import ControllerConfig
from weir.errors import Unavailable, WeirError
from weir.lifecycle import Role
from weir.rpc.convert import role_from_pb, role_to_pb
from weir.rpc.limits import RpcLimits
from weir.rpc.status import from_rpc_error
from weir.rpc.v1 import controller_pb2, controller_pb2_grpc, worker_pb2, worker_pb2_grpc
from weir.services.controller.balancing import make_loop
from weir.services.controller.ledger import RoleLedger
from weir.services.controller.loop import BalanceLoop
from weir.services.controller.servicer import SERVICE_NAME, ControllerServicer
from weir.services.controller.workers import RoleAnswer
from weir.telemetry.metrics import ControllerMetrics

Watch = Callable[[str, Role, int], None]
"""Told the worker, the role and the epoch of what is asked."""

ROLE_CHANGE_TIMEOUT_S = 5.0
ROLE_DRAIN_MS = 500.0


class ControllerNode(Node):
    """The controller. ``flip`` is what an operator asks; ``balance`` decides by itself when the plan says so."""

    servicer: ControllerServicer | None = None
    balance: BalanceLoop | None = None

    async def live(self, process: Process, stop: asyncio.Event) -> None:
        """See Node."""
        bus, registry = SimBus(self.link), SimRegistry(self.link, self.clock)
        metrics = ControllerMetrics()
        servicer = ControllerServicer(
            registry=registry,
            ledger=RoleLedger(100),
            workers=_SimWorkers(self.world.network.open_channel(process), self.world.checks.roles.asked),
            clock=self.clock,
            metrics=metrics,
            role_change_timeout_s=ROLE_CHANGE_TIMEOUT_S,
        )
        if self.world.plan.balance is not None:
            servicer.balance = self._make_loop(self.world.plan.balance, servicer, bus, registry, metrics)

        def register(server: Any) -> Sequence[str]:
            controller_pb2_grpc.add_ControllerServiceServicer_to_server(servicer, server)
            return (SERVICE_NAME,)

        async def start() -> None:
            await registry.watch(lambda change: None)
            if servicer.balance is not None:
                await servicer.balance.open()
            self.servicer, self.balance = servicer, servicer.balance

        async def drain() -> None:
            if servicer.balance is not None:
                await servicer.balance.close()
            await servicer.drain()

        async def close() -> None:
            await self.leave_nats(bus, registry)

        await self.serve(stop, register=register, start=start, drain=drain, close=close)

    def _make_loop(
        self,
        config: ControllerConfig,
        servicer: ControllerServicer,
        bus: SimBus,
        registry: SimRegistry,
        metrics: ControllerMetrics,
    ) -> BalanceLoop:
        loop = make_loop(
            config,
            identity=self.host,
            registry=registry,
            bus=bus,
            clock=self.clock,
            changes=servicer.changes,
            metrics=metrics,
        )
        step = loop.controller.step

        def watched(seen: Observation, now_s: float) -> Decision:
            decision = step(seen, now_s)
            self.world.checks.roles.decided(loop.controller, decision)
            return decision

        loop.controller.step = watched  # type: ignore[method-assign]
        self.world.checks.roles.begun(config)
        return loop

    def flip(self, worker: str, role: Role) -> None:
        """An operator wants ``worker`` to have another role."""
        if self.process is not None and self.servicer is not None:
            self.process.spawn(self._flip(worker, role))

    async def _flip(self, worker: str, role: Role) -> None:
        assert self.servicer is not None
        BY_HAND.set(True)
        request = controller_pb2.SetWorkerRoleRequest(
            worker_id=worker, role=role_to_pb(role), drain_timeout_ms=ROLE_DRAIN_MS
        )
        note = self.world.history.note
        try:
            answer = await self.servicer.SetWorkerRole(request, None)  # type: ignore[arg-type]
            note(self.host, f"{worker} is {role.value} now, epoch {answer.role_epoch}")
        except WeirError as error:
            note(self.host, f"{worker} does not become {role.value}: {error}")

    def _gone(self, silent: bool) -> None:
        super()._gone(silent)
        self.servicer = self.balance = None


class _SimWorkers:
    """WorkerPort over a simulated channel."""

    def __init__(self, open_channel: Callable[..., Any], watch: Watch) -> None:
        self._open_channel = open_channel
        self._watch = watch

    async def set_role(
        self, address: str, role: Role, *, expected_epoch: int, drain_timeout_ms: float, timeout_s: float
    ) -> RoleAnswer:
        """See WorkerPort."""
        self._watch(address, role, expected_epoch)
        channel = self._open_channel(address, limits=RpcLimits())
        request = worker_pb2.SetRoleRequest(
            role=role_to_pb(role), expected_epoch=expected_epoch, drain_timeout_ms=drain_timeout_ms
        )
        try:
            answer = await worker_pb2_grpc.WorkerServiceStub(channel).SetRole(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        except TimeoutError:
            raise Unavailable(f"{address} did not answer") from None
        finally:
            await channel.close()
        return RoleAnswer(role_from_pb(answer.role), answer.role_epoch, answer.took_ms)
