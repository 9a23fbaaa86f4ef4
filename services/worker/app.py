"""Composition root of a worker process."""

import asyncio
import logging
import secrets
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from weir.clock import Clock, SystemClock
from weir.config import LimitsConfig, NatsConfig, SecurityConfig, TelemetryConfig, WorkerConfig
from weir.config.flags import CommandLine
from weir.errors import InternalError, WeirError
from weir.events.bus import EventBus
from weir.events.memory import MemoryBus, MemoryRegistry, MemoryServer
from weir.events.nats_bus import NatsBus
from weir.events.nats_link import NatsLink
from weir.events.nats_registry import NatsRegistry
from weir.events.nats_trust import nats_trust
from weir.events.registry import Registry
from weir.events.subjects import check_token
from weir.ids import WorkerKey, mint_incarnation, mint_worker_id
from weir.rpc.descriptors import Descriptors, raise_descriptor_limit
from weir.rpc.limits import RpcLimits
from weir.rpc.security import Part, Security, load_security
from weir.rpc.server import RpcServer, install_stop_signals, serve
from weir.services.worker.host import WorkerEdges, WorkerHost
from weir.services.worker.parts import WorkerParts, build_parts, set_threads, warm_up
from weir.services.worker.profile import with_profile
from weir.telemetry.metrics import MetricsServer, WorkerMetrics
from weir.telemetry.spans import SpanCollector, Tracer, make_tracer
from weir.transfer.local import LocalFabric, LocalTransfer
from weir.transfer.nixl import NixlTransfer
from weir.transfer.plan import KvTransfer

_log = logging.getLogger(__name__)

NO_NATS = "none"
_UNSPECIFIED_HOSTS = ("", "0.0.0.0", "::")
SWITCH_INTERVAL_S = 0.0005
"""Longest time that the step thread's Python keeps the event loop waiting (CPython's default is ten times it)."""


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """All sections that a worker reads."""

    worker: WorkerConfig
    nats: NatsConfig = field(default_factory=NatsConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)

    @classmethod
    def load(cls, given: CommandLine) -> "WorkerSettings":
        """Resolve the sections; raises InvalidArgument and NotFound as ``load_config``."""
        return cls(
            worker=given.load(WorkerConfig, "worker"),
            nats=given.load(NatsConfig, "nats"),
            limits=given.load(LimitsConfig, "limits"),
            telemetry=given.load(TelemetryConfig, "telemetry"),
            security=given.load(SecurityConfig, "security"),
        )


@dataclass(frozen=True, slots=True)
class Ready:
    """What is announced when the worker can be used."""

    worker_id: str
    role: str
    address: str


async def run(
    settings: WorkerSettings,
    *,
    on_ready: Callable[[Ready], None],
    stop: asyncio.Event | None = None,
) -> None:
    """Run a worker until a signal (or ``stop``).

    Raises ModelError, InvalidArgument, NotFound, TransferUnavailable or Unavailable when it cannot start, before
    anybody has learnt of it; WorkerFailed when it had to stop.
    """
    config, clock = settings.worker, SystemClock()
    security = load_security(settings.security, Part.SERVICE)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    set_threads(config)
    key = WorkerKey(_worker_id(config), mint_incarnation(secrets.randbits))
    tracer = make_tracer(settings.telemetry, "worker", key.worker_id, clock, secrets.randbits)
    parts = build_parts(config, clock)
    warm_up(parts)
    parts = with_profile(parts, config, clock)
    transfer = make_transfer(config, parts, key, clock)
    try:
        process = _Process(settings, key, parts, transfer, clock, tracer, security)
        await process.connect()
    except BaseException:
        await transfer.close()
        raise
    await process.serve(on_ready, stop)


class WorkerFailed(InternalError):
    """Its step thread died or hangs, or one of its own tasks died; it has left the others and told them why."""


class _Process:
    """The worker's host and what belongs to its process: connections, metrics door, server."""

    def __init__(
        self,
        settings: WorkerSettings,
        key: WorkerKey,
        parts: WorkerParts,
        transfer: KvTransfer,
        clock: Clock,
        tracer: Tracer,
        security: Security | None,
    ) -> None:
        self._settings = settings
        self._security = security
        self._key = key
        self._parts = parts
        self._transfer = transfer
        self._clock = clock
        self._tracer = tracer
        self._link: NatsLink | None = None
        self._server: RpcServer | None = None
        self._exporter: MetricsServer | None = None
        self._host: WorkerHost | None = None
        raise_descriptor_limit()
        self._descriptors = Descriptors(clock)
        self._stop = asyncio.Event()
        self._fault: WeirError | None = None

    async def connect(self) -> None:
        """Connect to NATS and compose the host."""
        metrics = WorkerMetrics(self._parts.model_name)
        metrics.watch_descriptors(self._descriptors.stats)
        SpanCollector(self._tracer).register(metrics.registry)
        bus, registry = await self._events()
        self._host = WorkerHost(
            self._key,
            self._settings.worker,
            self._parts,
            WorkerEdges(self._transfer, bus, registry, self._descriptors),
            self._clock,
            metrics=metrics,
            tracer=self._tracer,
            on_fault=self._on_fault,
        )
        if self._settings.telemetry.metrics_bind:
            self._exporter = MetricsServer(self._settings.telemetry.metrics_bind, metrics)

    async def _events(self) -> tuple[EventBus, Registry]:
        if self._settings.nats.url == NO_NATS:
            server = MemoryServer()
            return MemoryBus(server), MemoryRegistry(server, self._clock)
        trust = nats_trust(self._security, self._settings.nats)
        self._link = await NatsLink.connect(self._settings.nats, name=self._key.worker_id, trust=trust)
        return await NatsBus.open(self._link), await NatsRegistry.open(self._link, self._clock)

    async def serve(self, on_ready: Callable[[Ready], None], stop: asyncio.Event | None) -> None:
        """Run the server around the host, until it is stopped or has failed; raises WorkerFailed then."""
        assert self._host is not None
        host, config, limits = self._host, self._settings.worker, self._settings.limits
        if stop is None:
            install_stop_signals(self._stop)
        else:
            self._stop = stop

        async def on_started(server: RpcServer) -> None:
            self._server = server
            address = config.advertise or reachable_address(server.address, self._settings.nats.url)
            await host.start(address)
            await server.set_ready(True)
            _log.info("worker %s serves %s as %s at %s", self._key, host.parts.model_name, config.role.value, address)
            on_ready(Ready(self._key.worker_id, config.role.value, address))

        await serve(
            name="worker",
            bind=config.bind,
            register=host.register,
            on_started=on_started,
            drain=host.drain,
            close=self._close,
            grace_s=limits.stop_grace_s,
            drain_timeout_s=limits.drain_timeout_s,
            limits=RpcLimits.of(limits),
            reflection=config.reflection,
            credentials=None
            if self._security is None
            else self._security.server_credentials(clients_have_certificates=True),
            descriptors=self._descriptors,
            stop=self._stop,
        )
        if self._fault is not None:
            raise WorkerFailed(str(self._fault))

    def _on_fault(self, error: WeirError) -> None:
        """A worker that cannot do its work is of no use: it leaves in order, and its supervisor starts another."""
        self._fault = self._fault or error
        self._stop.set()

    async def _close(self) -> None:
        assert self._host is not None
        await self._host.close()
        await asyncio.to_thread(self._tracer.shutdown)
        await self._host.edges.registry.close()
        await self._host.edges.bus.close()
        if self._link is not None:
            await self._link.close()
        if self._exporter is not None:
            self._exporter.close()


def make_transfer(config: WorkerConfig, parts: WorkerParts, key: WorkerKey, clock: Clock) -> KvTransfer:
    """How KV is read; TransferUnavailable with the reason when it cannot be had."""
    if config.transfer == "local":
        return LocalTransfer(LocalFabric(), parts.pool, key, parts.fingerprint, clock=clock)
    return NixlTransfer(
        parts.pool,
        key,
        parts.fingerprint,
        host_id=host_id(),
        clock=clock,
        max_outstanding=config.max_outstanding_reads,
    )


def host_id() -> str:
    """A name for this machine (or container) that two machines do not share."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()}:{boot.read_text().strip()}" if boot.exists() else socket.gethostname()


def reachable_address(bound: str, nats_url: str) -> str:
    """``bound`` (host:port), with an unspecified host (0.0.0.0, ::) replaced by one that others can connect to.

    That is the address this machine (or container) has on its way to NATS, which routers reach too; without such
    a way, the host's name.
    """
    host, _, port = bound.rpartition(":")
    if host.strip("[]") not in _UNSPECIFIED_HOSTS:
        return bound
    own = _own_address_towards(nats_url) or socket.gethostname()
    return f"[{own}]:{port}" if ":" in own else f"{own}:{port}"


def _own_address_towards(nats_url: str) -> str | None:
    """The source address of packets to the first server of ``nats_url``; sends nothing."""
    first = nats_url.split(",")[0].strip()
    url = urlsplit(first if "//" in first else f"nats://{first}")
    if not url.hostname or first == NO_NATS:
        return None
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(url.hostname, url.port or 4222, type=socket.SOCK_DGRAM)[
            0
        ]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _worker_id(config: WorkerConfig) -> str:
    given = config.worker_id or mint_worker_id(config.role.value, secrets.randbits)
    return check_token("worker.worker_id", given)
