"""Composition root of the router."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import secrets
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from weir.clock import Clock, SystemClock
from weir.config import LimitsConfig, NatsConfig, RouterConfig, SecurityConfig, TelemetryConfig
from weir.config.flags import CommandLine
from weir.errors import InvalidArgument
from weir.events.bus import EventBus
from weir.events.nats_bus import NatsBus
from weir.events.nats_link import NatsLink
from weir.events.nats_registry import NatsRegistry
from weir.events.nats_trust import nats_trust
from weir.events.registry import Registry
from weir.ids import RequestIdMint, WorkerKey, mint_incarnation
from weir.rpc.channel import channel
from weir.rpc.descriptors import Descriptors, raise_descriptor_limit
from weir.rpc.health import PATH_PREFIX
from weir.rpc.limits import RpcLimits
from weir.rpc.security import Part, Security, load_security
from weir.rpc.server import RpcServer, serve
from weir.rpc.tokens import TokenBook, TokenInterceptor
from weir.rpc.v1 import router_pb2_grpc
from weir.services.router.advice import Counsel
from weir.services.router.book import RequestBook
from weir.services.router.catalog import Catalog
from weir.services.router.events import LifecyclePublisher
from weir.services.router.facts import BookLimits
from weir.services.router.fleet import Fleet
from weir.services.router.http_door import HttpDoor, HttpLimits
from weir.services.router.http_server import TlsPair
from weir.services.router.intake import Intake, IntakeLimits
from weir.services.router.links import Links
from weir.services.router.meters import Meters
from weir.services.router.models import ModelLoader
from weir.services.router.policy import LeastLoaded, Policy
from weir.services.router.prefixes import PrefixMap
from weir.services.router.retry import RetryBudget
from weir.services.router.router import Router, RouterParts
from weir.services.router.servicer import OPERATOR_METHODS, SERVICE_NAME, RouterServicer
from weir.services.router.sessions import OpenChannel
from weir.services.router.slo_policy import SloOptions, SloPolicy
from weir.services.router.traces import RequestTraces
from weir.services.router.view import FleetView
from weir.telemetry.metrics import CONTENT_TYPE, MetricsServer, RouterMetrics
from weir.telemetry.spans import SpanCollector, Tracer, make_tracer

_log = logging.getLogger(__name__)

TOKENISER_THREADS = 2
METRICS_REFRESH_S = 1.0


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """All sections that the router reads."""

    router: RouterConfig
    nats: NatsConfig
    limits: LimitsConfig
    telemetry: TelemetryConfig
    security: SecurityConfig = field(default_factory=SecurityConfig)

    @classmethod
    def load(cls, given: CommandLine) -> RouterSettings:
        """Resolve the sections; raises InvalidArgument and NotFound as ``load_config``."""
        return cls(
            router=given.load(RouterConfig, "router"),
            nats=given.load(NatsConfig, "nats"),
            limits=given.load(LimitsConfig, "limits"),
            telemetry=given.load(TelemetryConfig, "telemetry"),
            security=given.load(SecurityConfig, "security"),
        )


@dataclass(frozen=True, slots=True)
class Doors:
    """How the router's doors are locked: TLS, and who may come in. Empty is open."""

    security: Security | None = None
    tokens: TokenBook | None = None

    @classmethod
    def of(cls, config: SecurityConfig) -> Doors:
        """Raises InvalidArgument for settings that do not go together."""
        security = load_security(config, Part.ROUTER)
        return cls() if security is None else cls(security, TokenBook.read(config.tokens_file))

    @property
    def tls(self) -> TlsPair | None:
        """What the HTTP door shows."""
        return None if self.security is None else TlsPair(self.security.cert_file, self.security.key_file)

    def credentials(self) -> grpc.ServerCredentials | None:
        """What the gRPC door shows; clients need no certificate."""
        return None if self.security is None else self.security.server_credentials(clients_have_certificates=False)

    def interceptors(self) -> Sequence[grpc.aio.ServerInterceptor[Any, Any]]:
        """What stands before the servicer."""
        if self.tokens is None:
            return ()
        return (TokenInterceptor(self.tokens, open_prefixes=(PATH_PREFIX,), operator_methods=OPERATOR_METHODS),)


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where a router can be reached; ``http`` is empty when that door is shut."""

    grpc: str
    http: str


class RouterApp:
    """A router on a given bus and registry. ``open`` once, ``close`` once; the bus stays with its owner."""

    def __init__(
        self,
        settings: RouterSettings,
        bus: EventBus,
        registry: Registry,
        clock: Clock,
        *,
        random_bits: Callable[[int], int] = secrets.randbits,
        open_channel: OpenChannel = channel,
        tracer: Tracer | None = None,
        doors: Doors | None = None,
    ) -> None:
        self.settings = settings
        self._doors = doors or Doors()
        config = settings.router
        router_id = config.router_id or f"router-{random_bits(24):06x}"
        incarnation = mint_incarnation(random_bits)
        jitter = random.Random(random_bits(64)).random
        self._executor = ThreadPoolExecutor(TOKENISER_THREADS, thread_name_prefix="tokenise")
        fleet = Fleet(partial(_salt, router_id))
        prefixes = PrefixMap(config.prefix_index_blocks)
        catalog = Catalog(fleet.token_limit)
        self._models = ModelLoader(catalog, self._executor, lambda: None)
        self._clock = clock
        self.metrics = RouterMetrics()
        self.metrics.watch_bus(bus.stats)
        self.descriptors = Descriptors(clock)
        self.metrics.watch_descriptors(self.descriptors.stats)
        self.tracer = tracer or make_tracer(settings.telemetry, "router", router_id, clock, random_bits)
        SpanCollector(self.tracer).register(self.metrics.registry)
        self.publisher = LifecyclePublisher(bus, clock, router_id, incarnation)
        self.router = Router(
            RouterParts(
                clock=clock,
                fleet=fleet,
                prefixes=prefixes,
                book=_book(config, fleet, make_policy(config, prefixes, jitter, fleet.counsel), jitter),
                catalog=catalog,
                intake=Intake(
                    catalog,
                    self._executor,
                    limits=_intake_limits(config),
                    random_bits=random_bits,
                ),
                publisher=self.publisher,
                meters=Meters(self.metrics),
                traces=RequestTraces(self.tracer, clock, settings.telemetry.trace_ring),
                models=self._models,
                mint=RequestIdMint(random_bits),
                links=partial(
                    Links,
                    router_id=router_id,
                    incarnation=incarnation,
                    clock=clock,
                    limits=rpc_limits(settings.limits),
                    connect_timeout_s=config.worker_connect_timeout_s,
                    random=jitter,
                    open_channel=open_channel,
                ),
                request_timeout_s=config.request_timeout_s,
            )
        )
        self._view = FleetView(self.router, registry, bus)
        self._door: HttpDoor | None = None
        self._refresh: asyncio.TimerHandle | None = None

    async def open(self) -> None:
        """Load the model named, subscribe; when it returns, requests are taken. Raises ModelError, Unavailable."""
        config = self.settings.router
        if config.model_path:
            await self._models.load(
                Path(config.model_path), config.model_name, self._clock.unix_s(), config.chat_template
            )
        self.publisher.start()
        self._refresh_metrics()
        await self._view.open()

    def _refresh_metrics(self) -> None:
        """Now and then, on the loop: an exporter on an address of its own runs in another thread."""
        self.router.refresh_metrics()
        loop = asyncio.get_running_loop()
        self._refresh = loop.call_later(METRICS_REFRESH_S, self._refresh_metrics)

    async def open_http(self, bind: str) -> str:
        """Serve OpenAI's API on ``bind``; returns the address."""
        self._door = HttpDoor(
            self.router,
            piece=self.router.token_piece,
            healthy=self.router.unready_reason,
            metrics=lambda: (self.router.render_metrics(), CONTENT_TYPE),
            limits=HttpLimits(body_bytes=self.settings.router.max_prompt_bytes),
            tokens=self._doors.tokens,
            tls=self._doors.tls,
            ui=self.settings.router.ui,
            descriptors=self.descriptors,
        )
        return await self._door.start(bind)

    def register(self, server: grpc.aio.Server) -> Sequence[str]:
        """Add RouterService to ``server``."""
        router_pb2_grpc.add_RouterServiceServicer_to_server(RouterServicer(self.router, self._doors.tokens), server)
        return (SERVICE_NAME,)

    async def drain(self) -> None:
        """Take nothing new and let requests end, within the drain timeout."""
        await self.router.drain()

    async def close(self) -> None:
        """End everything. Idempotent."""
        if self._refresh is not None:
            self._refresh.cancel()
        if self._door is not None:
            await self._door.stop(self.settings.limits.stop_grace_s)
        await self._view.close()
        await self.router.close()
        self._executor.shutdown(wait=False, cancel_futures=True)
        if self.tracer.enabled:
            await asyncio.to_thread(self.tracer.shutdown)


def make_policy(
    config: RouterConfig, prefixes: PrefixMap, draw: Callable[[], float], counsel: Counsel | None = None
) -> Policy:
    """The policy that the configuration names; ``draw`` gives numbers in [0, 1)."""
    if config.policy == "least-loaded":
        return LeastLoaded()
    options = SloOptions(
        queue_ms=config.worker_queue_ms,
        local_tokens=config.local_prefill_tokens,
        max_joins=config.decode_joins,
        late_s=config.heartbeat_late_s,
    )
    return SloPolicy(prefixes, options, draw, counsel)


def _salt(router_id: str, worker: WorkerKey) -> float:
    """In [0, 1), the same for ever for one pair: how this router settles ties, unlike the others."""
    name = f"{router_id}/{worker.worker_id}/{worker.incarnation}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=6).digest(), "big") / (1 << 48)


def _intake_limits(config: RouterConfig) -> IntakeLimits:
    for name in ("slo_ttft_ms", "slo_tpot_ms"):
        value = getattr(config, name)
        if value > config.slo_limit_ms:
            raise InvalidArgument(f"router.{name}", value, f"at most slo_limit_ms = {config.slo_limit_ms:g}")
    if config.tenant_max_queued > config.max_queued_requests:
        limit = f"at most max_queued_requests = {config.max_queued_requests}"
        raise InvalidArgument("router.tenant_max_queued", config.tenant_max_queued, limit)
    return IntakeLimits(
        max_prompt_bytes=config.max_prompt_bytes,
        slo_limit_ms=config.slo_limit_ms,
        slo_ttft_ms=config.slo_ttft_ms,
        slo_tpot_ms=config.slo_tpot_ms,
        max_output_tokens=config.max_output_tokens,
    )


def _book(config: RouterConfig, fleet: Fleet, policy: Policy, jitter: Callable[[], float]) -> RequestBook:
    limits = BookLimits(
        max_active=config.max_active_requests,
        max_queued=config.max_queued_requests,
        queue_timeout_s=config.queue_timeout_s,
        max_attempts=config.max_attempts,
        backoff_first_s=config.retry_backoff_ms / 1e3,
        lease_s=config.lease_s,
        tenant_max_active=config.tenant_max_active,
        tenant_max_queued=config.tenant_max_queued,
    )
    budget = RetryBudget(config.retry_budget, config.retry_budget_min)
    return RequestBook(fleet, policy, limits, budget, jitter)


def rpc_limits(limits: LimitsConfig) -> RpcLimits:
    """The gRPC bounds of a configuration."""
    return RpcLimits(
        message_bytes=limits.message_bytes,
        max_concurrent_streams=limits.max_concurrent_streams,
        keepalive_s=limits.keepalive_s,
        keepalive_timeout_s=limits.keepalive_timeout_s,
    )


async def run(
    settings: RouterSettings,
    *,
    on_ready: Callable[[Addresses], None],
    stop: asyncio.Event | None = None,
) -> None:
    """Run the router until a signal (or ``stop``); ``on_ready`` gets its addresses.

    Raises Unavailable when NATS or an address cannot be had, ModelError for a model that cannot be used.
    """
    raise_descriptor_limit()
    clock = SystemClock()
    doors = Doors.of(settings.security)
    link = await NatsLink.connect(
        settings.nats, name=settings.router.router_id or "router", trust=nats_trust(doors.security, settings.nats)
    )
    closers: list[Callable[[], Awaitable[None]]] = [link.close]
    try:
        bus = await NatsBus.open(link)
        closers.insert(0, bus.close)
        registry = await NatsRegistry.open(link, clock)
        closers.insert(0, registry.close)
        open_channel = partial(channel, security=doors.security)
        app = RouterApp(settings, bus, registry, clock, open_channel=open_channel, doors=doors)
        closers.insert(0, app.close)
        await _serve(app, settings, doors, closers, on_ready, stop)
    except BaseException:
        await _close_all(closers)
        raise


async def _serve(
    app: RouterApp,
    settings: RouterSettings,
    doors: Doors,
    closers: list[Callable[[], Awaitable[None]]],
    on_ready: Callable[[Addresses], None],
    stop: asyncio.Event | None,
) -> None:
    async def on_started(server: RpcServer) -> None:
        await app.open()
        http = await app.open_http(settings.router.http_bind) if settings.router.http_bind else ""
        bind = settings.telemetry.metrics_bind
        if bind:
            exporter = MetricsServer(bind, app.metrics)
            closers.append(partial(asyncio.to_thread, exporter.close))
        await server.set_ready(True)
        on_ready(Addresses(server.address, http))

    await serve(
        name="router",
        bind=settings.router.bind,
        register=app.register,
        on_started=on_started,
        drain=app.drain,
        close=partial(_close_all, closers),
        grace_s=settings.limits.stop_grace_s,
        drain_timeout_s=settings.limits.drain_timeout_s,
        limits=rpc_limits(settings.limits),
        reflection=settings.router.reflection,
        interceptors=doors.interceptors(),
        credentials=doors.credentials(),
        descriptors=app.descriptors,
        stop=stop,
    )


async def _close_all(closers: list[Callable[[], Awaitable[None]]]) -> None:
    """Each of them, in order, once, whatever happens to the others."""
    while closers:
        closer = closers.pop(0)
        try:
            await closer()
        except Exception:
            _log.exception("closing failed")
