"""The processes of a cluster: production objects with simulated edges, started, killed and started again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import grpc

from tests.simulation.broker import SimBus, SimLink, SimRegistry
from tests.simulation.clock import SimClock
from tests.simulation.fabric import SimTransfer
from tests.simulation.model import CONTEXT, FINGERPRINT, MODEL, VOCAB, PoolModel, make_parts, text_of
from tests.simulation.network import SimServer
from tests.simulation.step_thread import SimStepLoop
from tests.simulation.virtual_time import Process
from weir.config import LimitsConfig, NatsConfig, RouterConfig, TelemetryConfig, WorkerConfig
from weir.engine.engine import Engine
from weir.errors import Unavailable
from weir.ids import WorkerKey, mint_incarnation
from weir.lifecycle import Role
from weir.rpc.convert import role_from_pb, role_to_pb
from weir.rpc.limits import RpcLimits
from weir.rpc.status import from_rpc_error
from weir.rpc.v1 import worker_pb2, worker_pb2_grpc
from weir.services.controller.ledger import RoleLedger
from weir.services.controller.servicer import ControllerServicer
from weir.services.controller.workers import RoleAnswer
from weir.services.router.app import RouterApp, RouterSettings
from weir.services.router.catalog import ServedModel
from weir.services.router.commands import SendBeginPrefill
from weir.services.worker.host import WorkerEdges, WorkerHost
from weir.services.worker.parts import WorkerParts
from weir.telemetry.metrics import ControllerMetrics

if TYPE_CHECKING:
    from tests.simulation.world import World

START_AGAIN_S = 0.5


class Node:
    """A place in the cluster where one process at a time runs. ``begin`` composes it, in its own context."""

    def __init__(self, world: World, host: str) -> None:
        self.world = world
        self.host = host
        self.random = Random(f"{world.plan.seed}/{host}")
        self.process: Process | None = None
        self.started = 0
        self.ready = False
        self.resumed_s = 0.0

    @property
    def alive(self) -> bool:
        """Whether a process is there, paused or not."""
        return self.process is not None

    def start(self) -> None:
        """Start a new process, unless one is there."""
        if self.process is not None:
            return
        self.started += 1
        process = self.process = Process(f"{self.host}#{self.started}", self.host)
        process.thread_lag_s = lambda: self.random.uniform(0.0, 0.002)
        world = self.world
        self.clock = SimClock(
            world.loop.time,
            rate=1.0 + self.random.uniform(-1e-4, 1e-4),
            offset_s=self.random.uniform(0.0, 1_000.0),
            skew_s=self.random.uniform(-1.0, 1.0) * world.plan.skew_s,
        )
        self.link = SimLink(world.broker, process)
        world.history.note(process, "starts")
        process.spawn(self._begin(process))

    async def _begin(self, process: Process) -> None:
        try:
            await self.begin(process)
        except Unavailable as error:
            # As a supervisor does: the process has ended, and is started again.
            self.world.history.note(process, f"cannot start: {error}")
            self.world.network.later(0.0, self.crash, False)
            self.world.network.later(START_AGAIN_S, self.start)
            return
        self.ready = True
        self.world.history.note(process, "is ready")

    async def begin(self, process: Process) -> None:
        """Compose and start what runs in ``process``."""
        raise NotImplementedError

    def crash(self, silent: bool) -> None:
        """The process is gone, as by SIGKILL, or, ``silent``, as by a power cut."""
        process, self.process = self.process, None
        if process is None:
            return
        self.ready = False
        self.world.history.note(process, "is killed" + (", silently" if silent else ""))
        self.world.loop.kill(process)
        self.link.close()
        self.world.network.crashed(process, silent=silent)

    def pause(self) -> None:
        """SIGSTOP."""
        if self.process is not None and not self.process.paused:
            self.world.history.note(self.process, "is stopped")
            self.process.paused = True
            self.world.network.paused(self.process)

    def resume(self) -> None:
        """SIGCONT."""
        if self.process is not None and self.process.paused:
            self.world.history.note(self.process, "goes on")
            self.resumed_s = self.world.loop.time()
            self.world.loop.resume(self.process)


class WorkerNode(Node):
    """A worker. ``address`` stays the same over restarts."""

    def __init__(self, world: World, host: str, config: WorkerConfig) -> None:
        super().__init__(world, host)
        self.config = config
        self.worker: WorkerHost | None = None
        self.parts: WorkerParts | None = None
        self.model: PoolModel | None = None

    @property
    def key(self) -> WorkerKey:
        """Of the process that runs, or ran last."""
        assert self.worker is not None
        return self.worker.key

    async def begin(self, process: Process) -> None:
        world = self.world
        self.parts, self.model = make_parts(self.config, self.clock)
        key = WorkerKey(self.host, mint_incarnation(self.random.getrandbits))
        transfer = SimTransfer(
            world.fabric,
            self.parts.pool,
            key,
            FINGERPRINT,
            clock=self.clock,
            network=world.network,
            fabric_faults=world.fabric_faults,
        )
        edges = WorkerEdges(transfer, SimBus(self.link), SimRegistry(self.link, self.clock))
        worker = WorkerHost(key, self.config, self.parts, edges, self.clock, step_loop=self._step_loop())
        self.worker = worker
        server = SimServer(process)
        worker.register(server)  # type: ignore[arg-type]
        world.network.servers[self.host] = server
        await worker.start(self.host)

    def _step_loop(self) -> type[SimStepLoop]:
        parts, world, random, slowness = self.parts, self.world, self.random, self.world.plan.step_s
        assert parts is not None

        def step_s(engine: Engine) -> float:
            return slowness * random.uniform(0.5, 1.5)

        def after_step(engine: Engine) -> None:
            parts.blocks.check_integrity()
            world.checks.after_step(self.host, parts)

        return type(
            "StepLoopOf" + self.host,
            (SimStepLoop,),
            {"step_s": staticmethod(step_s), "after_step": staticmethod(after_step)},
        )

    def crash(self, silent: bool) -> None:
        if self.worker is not None and self.process is not None:
            self.world.checks.worker_dies(self)
            self.world.fabric.kill(self.worker.key)
        super().crash(silent)
        self.worker = None


class RouterNode(Node):
    """A router, with a door that the clients of the schedule use."""

    def __init__(self, world: World, host: str, config: RouterConfig, limits: LimitsConfig) -> None:
        super().__init__(world, host)
        self.config = config
        self.limits = limits
        self.app: RouterApp | None = None

    async def begin(self, process: Process) -> None:
        settings = RouterSettings(self.config, NatsConfig(), self.limits, TelemetryConfig())
        app = RouterApp(
            settings,
            SimBus(self.link),
            SimRegistry(self.link, self.clock),
            self.clock,
            random_bits=self.random.getrandbits,
            open_channel=self.world.network.open_channel(process),
        )
        app.router._catalog.add(_served_model())
        self._watch_attempts(app)
        await app.open()
        self.app = app

    def _watch_attempts(self, app: RouterApp) -> None:
        send = app.router._do[SendBeginPrefill]

        def watched(command: SendBeginPrefill) -> None:
            self.world.checks.begins(command.admission.request_id, command.attempt)
            send(command)

        app.router._do[SendBeginPrefill] = watched

    def crash(self, silent: bool) -> None:
        super().crash(silent)
        self.app = None


class ControllerNode(Node):
    """The controller; ``flip`` asks it to change a role."""

    servicer: ControllerServicer | None = None

    async def begin(self, process: Process) -> None:
        registry = SimRegistry(self.link, self.clock)
        await registry.watch(lambda change: None)
        self.servicer = ControllerServicer(
            registry=registry,
            ledger=RoleLedger(100),
            workers=_SimWorkers(self.world.network.open_channel(process)),
            clock=self.clock,
            metrics=ControllerMetrics(),
            role_change_timeout_s=5.0,
        )


class _SimWorkers:
    """WorkerPort over a simulated channel."""

    def __init__(self, open_channel: Callable[..., Any]) -> None:
        self._open_channel = open_channel

    async def set_role(
        self, address: str, role: Role, *, expected_epoch: int, drain_timeout_ms: float, timeout_s: float
    ) -> RoleAnswer:
        """See WorkerPort."""
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


class _Tokenizer:
    """One character a token."""

    decoder = SimpleNamespace(strip_left=0)
    special_token_ids: frozenset[int] = frozenset()

    def token_bytes(self, skip_special_tokens: bool) -> Sequence[bytes]:
        """By token id."""
        return _PIECES

    def digest(self) -> str:
        """As in the fingerprint."""
        return FINGERPRINT.tokenizer


_PIECES = [text_of(token).encode() for token in range(VOCAB)]


def _served_model() -> ServedModel:
    tokenizer: Any = _Tokenizer()
    template: Any = None
    return ServedModel(MODEL, tokenizer, template, CONTEXT, "SimModel", VOCAB, 0)
