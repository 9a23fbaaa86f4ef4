"""A gRPC server and the ordered life of the process around it; one for all services.

    start: NOT_SERVING ─► set_ready(True): SERVING
        ─► SIGTERM or SIGINT: NOT_SERVING ─► drain() ─► server.stop(grace) ─► close()

``drain`` deregisters and lets running work end while the server still answers; the server stops before
``close`` takes its back ends away. A second signal exits at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection as grpc_reflection

from weir.errors import Unavailable
from weir.rpc.descriptors import Descriptors, PeerGate
from weir.rpc.health import NOT_SERVING, SERVICE_NAME, SERVING, HealthServicer
from weir.rpc.interceptors import ErrorInterceptor
from weir.rpc.limits import RpcLimits, server_options

_log = logging.getLogger(__name__)

Register = Callable[[grpc.aio.Server], Sequence[str]]


class RpcServer:
    """One server: health, reflection, limits, error mapping. ``start`` once, ``stop`` once."""

    def __init__(
        self,
        *,
        name: str,
        bind: str,
        limits: RpcLimits | None = None,
        reflection: bool = True,
        interceptors: Sequence[grpc.aio.ServerInterceptor[Any, Any]] = (),
        credentials: grpc.ServerCredentials | None = None,
        descriptors: Descriptors | None = None,
    ) -> None:
        """``credentials`` None serves without TLS; ``descriptors`` None takes clients until none is left."""
        self.name = name
        self.port = 0
        self._bind = bind
        self._limits = limits or RpcLimits()
        self._reflection = reflection
        self._descriptors = descriptors
        self._interceptors = (*interceptors, ErrorInterceptor(None if descriptors is None else PeerGate(descriptors)))
        self._credentials = credentials
        self._services: tuple[str, ...] = ()
        self._health: HealthServicer | None = None
        self._server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        """``host:port`` as bound, with the real port."""
        return f"{self._bind.rpartition(':')[0]}:{self.port}"

    async def start(self, register: Register) -> int:
        """Bind, add health, reflection and what ``register`` adds, and answer; returns the port.

        ``register`` returns the full names of its services. Raises Unavailable when the address is taken.
        """
        assert self._server is None, "a server starts once"
        connections = None if self._descriptors is None else self._descriptors.connections
        server = grpc.aio.server(interceptors=self._interceptors, options=server_options(self._limits, connections))
        self._health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        self._services = tuple(register(server))
        await self._health.set_all(self._services, NOT_SERVING)
        if self._reflection:
            names = (*self._services, SERVICE_NAME, grpc_reflection.SERVICE_NAME)
            grpc_reflection.enable_server_reflection(names, server)
        try:
            self.port = self._add_port(server)
        except RuntimeError as error:
            raise Unavailable(f"{self.name} cannot bind {self._bind}: {error}") from None
        await server.start()
        self._server = server
        return self.port

    def _add_port(self, server: grpc.aio.Server) -> int:
        if self._credentials is None:
            return server.add_insecure_port(self._bind)
        return server.add_secure_port(self._bind, self._credentials)

    async def set_ready(self, ready: bool) -> None:
        """Report SERVING or NOT_SERVING for the server and all its services."""
        assert self._health is not None, "not started"
        await self._health.set_all(self._services, SERVING if ready else NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, give open ones ``grace_s`` seconds, then cancel them. Idempotent."""
        if self._server is not None:
            await self.set_ready(False)
            server, self._server = self._server, None
            await server.stop(grace_s)


def install_stop_signals(stop: asyncio.Event) -> None:
    """The first SIGTERM or SIGINT sets ``stop``; the second exits at once with 128 + its number."""
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        _log.info("stopping on %s", signal.Signals(number).name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)


async def serve(
    *,
    name: str,
    bind: str,
    register: Register,
    on_started: Callable[[RpcServer], Coroutine[Any, Any, None]],
    drain: Callable[[], Awaitable[None]],
    close: Callable[[], Awaitable[None]],
    grace_s: float = 5.0,
    drain_timeout_s: float = 30.0,
    limits: RpcLimits | None = None,
    reflection: bool = True,
    interceptors: Sequence[grpc.aio.ServerInterceptor[Any, Any]] = (),
    credentials: grpc.ServerCredentials | None = None,
    descriptors: Descriptors | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Run a service until ``stop`` is set, in the order drawn above; ``close`` runs whatever happens.

    ``stop`` None handles SIGTERM and SIGINT; an event given by the caller leaves signals alone (tests).
    ``on_started`` gets the server once its port is known; it calls ``set_ready(True)`` when all is ready. It is
    cancelled when the stop comes first. ``descriptors`` bounds the clients.
    """
    if stop is None:
        stop = asyncio.Event()
        install_stop_signals(stop)
    server = RpcServer(
        name=name,
        bind=bind,
        limits=limits,
        reflection=reflection,
        interceptors=interceptors,
        credentials=credentials,
        descriptors=descriptors,
    )
    try:
        await server.start(register)
        try:
            await _started_or_stopped(on_started(server), stop)
            await stop.wait()
        finally:
            await server.set_ready(False)
            await _drained(name, drain, drain_timeout_s)
            await server.stop(grace_s)
    finally:
        await close()


async def _started_or_stopped(starting: Coroutine[Any, Any, None], stop: asyncio.Event) -> None:
    """Finish ``starting``, or cancel it when ``stop`` comes first: loading a model can take minutes."""
    start, stopped = asyncio.ensure_future(starting), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({start, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if start.done():
            start.result()
    finally:
        start.cancel()
        stopped.cancel()
        await asyncio.gather(start, stopped, return_exceptions=True)


async def _drained(name: str, drain: Callable[[], Awaitable[None]], timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await drain()
    except TimeoutError:
        _log.warning("%s: work still running after %g s of drain", name, timeout_s)
    except Exception:
        # What follows (stop, close) must happen even when the drain does not work.
        _log.exception("%s: drain failed", name)
