"""HTTP/1.1 inside a process of ours: on the running loop, without signals, logs or settings of its own."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from email.utils import formatdate

from weir.clock import Clock, SystemClock
from weir.errors import Unavailable
from weir.services.router.http_connection import HttpConnection
from weir.services.router.http_exchange import Exchange
from weir.services.router.openai_errors import HttpRefusal

_log = logging.getLogger(__name__)

_BACKLOG = 2048
_BACKSTOP_S = 2.0
_TICK_S = 1.0
_HEALTH = "/health"
_UNWELCOME_S = 2.0
"""How long a connection that there was no room for may take to ask, and so to hear why."""
_MAX_UNWELCOME = 16
"""Of these at a time; further ones are cut at once."""
_KEEPALIVE_IDLE_S, _KEEPALIVE_INTERVAL_S, _KEEPALIVE_PROBES = 15, 5, 3

Answer = Callable[[Exchange], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class TlsPair:
    """PEM files of the certificate that the door shows, and of its key."""

    cert_file: str
    key_file: str

    def context(self) -> ssl.SSLContext:
        """For a server whose clients need no certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.cert_file, self.key_file)
        return context


class HttpServer:
    """Serves ``answer``, a task for each request. ``start`` once, ``stop`` once.

    Connections that are idle for ``keep_alive_s`` are closed, also those that never sent a whole request;
    ``stalled_client_s``: one whose client takes nothing for this long is reset. ``room(held)`` says what requests of
    a new connection are answered with when there are ``held`` others and no room for it; health is always answered.
    A ``ConnectionOwner``.
    """

    def __init__(
        self,
        answer: Answer,
        *,
        max_body_bytes: int,
        keep_alive_s: float,
        stalled_client_s: float,
        tls: TlsPair | None = None,
        clock: Clock | None = None,
        room: Callable[[int], HttpRefusal | None] = lambda held: None,
    ) -> None:
        self.max_body_bytes = max_body_bytes
        self.date = b""
        self._answer = answer
        self._keep_alive_s = keep_alive_s
        self._stalled_client_s = stalled_client_s
        self._tls = tls
        self._clock = clock or SystemClock()
        self._room = room
        self._unwelcome = 0
        self._server: asyncio.Server | None = None
        self._connections: set[HttpConnection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._empty = asyncio.Event()
        self._empty.set()

    async def start(self, bind: str) -> str:
        """Listen on ``host:port`` (port 0 takes a free one); returns the address with the real port.

        Raises Unavailable when the address is taken or is none of this machine's.
        """
        assert self._server is None, "a server starts once"
        host, _, port = bind.rpartition(":")
        try:
            listener = await _bound_socket(host, int(port), self._stalled_client_s)
        except OSError as error:
            raise Unavailable(f"the HTTP door cannot bind {bind}: {error.strerror or error}") from None
        loop = asyncio.get_running_loop()
        context = None if self._tls is None else self._tls.context()
        self._tick()
        self._server = await loop.create_server(
            lambda: HttpConnection(self, loop), sock=listener, backlog=_BACKLOG, ssl=context
        )
        return f"{host}:{listener.getsockname()[1]}"

    async def stop(self, grace_s: float, abort: Callable[[], None]) -> None:
        """Listen no more; after ``grace_s`` call ``abort``, which ends open requests; then cut what is left."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        for connection in list(self._connections):
            connection.finish()
        await self._emptied(grace_s)
        abort()
        await self._emptied(_BACKSTOP_S)
        for connection in list(self._connections):
            connection.cut()
        if self._timer is not None:
            self._timer.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _emptied(self, timeout_s: float) -> None:
        """Wait until all connections are closed, for at most ``timeout_s``."""
        waiting = asyncio.ensure_future(self._empty.wait())
        await asyncio.wait({waiting}, timeout=timeout_s)
        waiting.cancel()

    def _tick(self) -> None:
        """Once a second: the date, and connections that are idle for too long."""
        loop = asyncio.get_running_loop()
        self.date = f"date: {formatdate(self._clock.unix_s(), usegmt=True)}\r\n".encode()
        now_s = loop.time()
        for connection in [c for c in self._connections if c.idle and now_s - c.idle_since_s > self._patience_s(c)]:
            connection.finish()
        self._timer = loop.call_later(_TICK_S, self._tick)

    def _patience_s(self, connection: HttpConnection) -> float:
        return self._keep_alive_s if connection.unwelcome is None else _UNWELCOME_S

    # ConnectionOwner

    def opened(self, connection: HttpConnection) -> None:
        """See ConnectionOwner."""
        connection.unwelcome = self._room(len(self._connections) - self._unwelcome)
        self._connections.add(connection)
        self._empty.clear()
        if connection.unwelcome is not None:
            self._unwelcome += 1
            if self._unwelcome > _MAX_UNWELCOME:
                connection.cut()

    def closed(self, connection: HttpConnection) -> None:
        """See ConnectionOwner."""
        self._connections.discard(connection)
        self._unwelcome -= connection.unwelcome is not None
        if not self._connections:
            self._empty.set()

    def serve(self, exchange: Exchange, unwelcome: HttpRefusal | None) -> None:
        """See ConnectionOwner."""
        task = asyncio.get_running_loop().create_task(self._run(exchange, unwelcome))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, exchange: Exchange, unwelcome: HttpRefusal | None) -> None:
        try:
            if unwelcome is None or exchange.head.path == _HEALTH:
                await self._answer(exchange)
            else:
                await exchange.refuse(unwelcome, {})
        except Exception:
            # The door answers for its errors; one of its own must not leave a client waiting.
            _log.exception("request %s %s failed", exchange.head.method, exchange.head.path)
        finally:
            exchange.close()


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
