"""uvicorn inside a process of ours: on the running loop, without signals, logs or settings of its own."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import uvicorn
from starlette.types import ASGIApp

from weir.errors import Unavailable

_BACKLOG = 2048
_BACKSTOP_S = 2.0
_TICK_S = 1.0
_KEEPALIVE_IDLE_S, _KEEPALIVE_INTERVAL_S, _KEEPALIVE_PROBES = 15, 5, 3


class _Uvicorn(uvicorn.Server):
    """Tells when it listens, is told when to stop, leaves signals to the process; idle, it wakes once a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self.stopping = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.listening.set()

    async def main_loop(self) -> None:
        while not self.stopping.is_set():
            await self.on_tick(0)  # renews the Date header
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await self.stopping.wait()


@dataclass(frozen=True, slots=True)
class TlsPair:
    """PEM files of the certificate that the door shows, and of its key."""

    cert_file: str
    key_file: str


class HttpServer:
    """Serves an ASGI application. ``start`` once, ``stop`` once."""

    def __init__(
        self, app: ASGIApp, *, keep_alive_s: float, stalled_client_s: float, tls: TlsPair | None = None
    ) -> None:
        """``stalled_client_s``: a connection whose client takes nothing for this long is reset."""
        self._app = app
        self._keep_alive_s = keep_alive_s
        self._stalled_client_s = stalled_client_s
        self._tls = tls
        self._server: _Uvicorn | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self, bind: str) -> str:
        """Listen on ``host:port`` (port 0 takes a free one); returns the address with the real port.

        Raises Unavailable when the address is taken or is none of this machine's.
        """
        assert self._serving is None, "a server starts once"
        host, _, port = bind.rpartition(":")
        try:
            listener = await _bound_socket(host, int(port), self._stalled_client_s)
        except OSError as error:
            raise Unavailable(f"the HTTP door cannot bind {bind}: {error.strerror or error}") from None
        config = uvicorn.Config(
            self._app,
            access_log=False,
            backlog=_BACKLOG,
            http="h11",
            interface="asgi3",
            lifespan="off",
            log_config=None,
            log_level="warning",
            proxy_headers=False,
            server_header=False,
            ssl_certfile=None if self._tls is None else self._tls.cert_file,
            ssl_keyfile=None if self._tls is None else self._tls.key_file,
            timeout_keep_alive=math.ceil(self._keep_alive_s),
            ws="none",
        )
        self._server = _Uvicorn(config)
        self._serving = asyncio.get_running_loop().create_task(self._server.serve(sockets=[listener]))
        listening = asyncio.ensure_future(self._server.listening.wait())
        try:
            await asyncio.wait({listening, self._serving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            listening.cancel()
        assert self._server.started, "uvicorn ended before it listened"
        return f"{host}:{listener.getsockname()[1]}"

    async def stop(self, grace_s: float, abort: Callable[[], None]) -> None:
        """Listen no more; after ``grace_s`` call ``abort``, which ends open requests; then cut what is left."""
        server, serving = self._server, self._serving
        if server is None or serving is None:
            return
        self._server = self._serving = None
        server.config.timeout_graceful_shutdown = math.ceil(grace_s + _BACKSTOP_S)
        server.stopping.set()
        await asyncio.wait({serving}, timeout=grace_s)
        abort()
        await serving
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        if server.server_state.tasks:
            await asyncio.wait(server.server_state.tasks)


async def _bound_socket(host: str, port: int, stalled_client_s: float) -> socket.socket:
    """A socket whose accepted connections find dead and stalled peers by themselves (Linux inherits options)."""
    loop = asyncio.get_running_loop()
    infos = await loop.getaddrinfo(host.strip("[]") or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = infos[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", _KEEPALIVE_IDLE_S),
            ("TCP_KEEPINTVL", _KEEPALIVE_INTERVAL_S),
            ("TCP_KEEPCNT", _KEEPALIVE_PROBES),
            ("TCP_USER_TIMEOUT", int(stalled_client_s * 1_000)),
        ):
            if hasattr(socket, name):
                listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
