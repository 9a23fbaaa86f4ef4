"""Composition root of the controller."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc.aio

from weir.clock import SystemClock
from weir.config import ControllerConfig, LimitsConfig, NatsConfig, SecurityConfig, TelemetryConfig
from weir.config.flags import CommandLine
from weir.events.nats_bus import NatsBus
from weir.events.nats_link import NatsLink
from weir.events.nats_registry import NatsRegistry
from weir.events.nats_trust import nats_trust
from weir.events.registry import ChangeKind, RegistryChange
from weir.rpc.limits import RpcLimits
from weir.rpc.security import Part, Security, load_security
from weir.rpc.server import RpcServer, serve
from weir.rpc.v1 import common_pb2, controller_pb2_grpc
from weir.services.controller.balancing import limits_of, make_loop, profile_of
from weir.services.controller.ledger import RoleLedger
from weir.services.controller.loop import BalanceLoop
from weir.services.controller.servicer import SERVICE_NAME, ControllerServicer
from weir.services.controller.workers import GrpcWorkers
from weir.telemetry.metrics import ControllerMetrics, MetricsServer
from weir.telemetry.spans import SpanCollector, Tracer, make_tracer


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """All sections that the controller reads."""

    controller: ControllerConfig
    nats: NatsConfig
    limits: LimitsConfig
    telemetry: TelemetryConfig
    security: SecurityConfig = field(default_factory=SecurityConfig)

    @classmethod
    def load(cls, given: CommandLine) -> ControllerSettings:
        """Resolve the sections; raises InvalidArgument and NotFound as ``load_config``."""
        return cls(
            controller=given.load(ControllerConfig, "controller"),
            nats=given.load(NatsConfig, "nats"),
            limits=given.load(LimitsConfig, "limits"),
            telemetry=given.load(TelemetryConfig, "telemetry"),
            security=given.load(SecurityConfig, "security"),
        )


async def run(
    settings: ControllerSettings,
    *,
    on_ready: Callable[[str], None],
    stop: asyncio.Event | None = None,
) -> None:
    """Run the controller until a signal (or ``stop``); ``on_ready`` gets its address.

    Raises InvalidArgument for settings that contradict each other, Unavailable when NATS or the address cannot be had.
    """
    config = settings.controller
    limits_of(config)
    profile_of(config)
    security = load_security(settings.security, Part.SERVICE)
    identity = config.controller_id or f"controller-{secrets.randbits(24):06x}"
    tracer = make_tracer(settings.telemetry, "controller", identity, SystemClock(), secrets.randbits)
    link = await NatsLink.connect(settings.nats, name=identity, trust=nats_trust(security, settings.nats))
    try:
        parts = await _compose(settings, identity, link, tracer, security)
    except BaseException:
        await link.close()
        raise

    def register(server: grpc.aio.Server) -> Sequence[str]:
        controller_pb2_grpc.add_ControllerServiceServicer_to_server(parts.servicer, server)
        return (SERVICE_NAME,)

    async def on_started(server: RpcServer) -> None:
        await server.set_ready(True)
        on_ready(server.address)

    await serve(
        name="controller",
        bind=config.bind,
        register=register,
        on_started=on_started,
        drain=parts.drain,
        close=parts.close,
        grace_s=settings.limits.stop_grace_s,
        drain_timeout_s=settings.limits.drain_timeout_s,
        limits=RpcLimits.of(settings.limits),
        reflection=config.reflection,
        credentials=None if security is None else security.server_credentials(clients_have_certificates=True),
        stop=stop,
    )


@dataclass(slots=True)
class _Parts:
    """What runs beside the server. ``bus`` and ``balance`` are there when the mode is not off."""

    link: NatsLink
    registry: NatsRegistry
    servicer: ControllerServicer
    tracer: Tracer
    bus: NatsBus | None = None
    balance: BalanceLoop | None = None
    exporter: MetricsServer | None = None

    async def drain(self) -> None:
        """Decide nothing more; let role changes end."""
        if self.balance is not None:
            await self.balance.close()
        await self.servicer.drain()

    async def close(self) -> None:
        """Leave NATS."""
        if self.bus is not None:
            await self.bus.close()
        await self.registry.close()
        await self.link.close()
        await asyncio.to_thread(self.tracer.shutdown)
        if self.exporter is not None:
            self.exporter.close()


async def _compose(
    settings: ControllerSettings, identity: str, link: NatsLink, tracer: Tracer, security: Security | None
) -> _Parts:
    config, clock, metrics = settings.controller, SystemClock(), ControllerMetrics()
    registry = await NatsRegistry.open(link, clock)
    servicer = ControllerServicer(
        registry=registry,
        ledger=RoleLedger(config.max_role_changes_kept),
        workers=GrpcWorkers(RpcLimits.of(settings.limits), security),
        clock=clock,
        metrics=metrics,
        role_change_timeout_s=config.role_change_timeout_s,
    )
    await registry.watch(_membership_metrics(registry, metrics))
    SpanCollector(tracer).register(metrics.registry)
    parts = _Parts(link, registry, servicer, tracer)
    if config.mode != "off":
        parts.bus = await NatsBus.open(link)
        parts.balance = servicer.balance = make_loop(
            config,
            identity=identity,
            registry=registry,
            bus=parts.bus,
            clock=clock,
            changes=servicer.changes,
            metrics=metrics,
            tracer=tracer,
        )
        await parts.balance.open()
    if settings.telemetry.metrics_bind:
        parts.exporter = MetricsServer(settings.telemetry.metrics_bind, metrics)
    return parts


def _membership_metrics(registry: NatsRegistry, metrics: ControllerMetrics) -> Callable[[RegistryChange], None]:
    def on_change(change: RegistryChange) -> None:
        if change.kind in (ChangeKind.STALE, ChangeKind.SYNCED):
            metrics.registry_stale.set(change.kind is ChangeKind.STALE)
        roles = Counter(_role_name(record.role) for record in registry.snapshot().values())
        metrics.members.clear()
        for role, count in roles.items():
            metrics.members.labels(role).set(count)

    return on_change


def _role_name(role: int) -> str:
    known = role in common_pb2.Role.values()
    return common_pb2.Role.Name(role).removeprefix("ROLE_").lower() if known else "unknown"
