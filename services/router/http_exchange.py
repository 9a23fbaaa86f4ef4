"""One HTTP request and its response, whatever carries them, watching all the while whether the client is there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Protocol

from weir.errors import WeirError
from weir.services.router.openai_errors import HttpRefusal

_JSON_KINDS = (b"application/json", b"")
_REASONS = {status.value: status.phrase for status in HTTPStatus}
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"
DISCARDED_BYTES = 1 << 20
"""Bytes of a body that are read and thrown away after an early answer, so that the client gets to read it."""


class ClientLeft(Exception):
    """The client went away before its request was read."""


@dataclass(slots=True)
class Head:
    """What a request begins with. ``headers``: names in lower case, the last of a name counts.

    ``keep_alive``: whether the client wants another request on the connection; ``chunks``: whether it knows chunked
    bodies, as every client of HTTP/1.1 does.
    """

    method: str = "GET"
    path: str = "/"
    headers: Mapping[bytes, bytes] = field(default_factory=dict)
    keep_alive: bool = True
    chunks: bool = True


class Wire(Protocol):
    """The connection under an exchange; bytes for a client that is gone are dropped."""

    @property
    def paused(self) -> bool:
        """Whether the client is slow: what is written now waits in memory."""
        ...

    @property
    def date(self) -> bytes:
        """The present ``Date`` header, a whole line."""
        ...

    def write(self, data: bytes) -> None:
        """Send."""
        ...

    def ended(self, exchange: Exchange, *, keep_alive: bool) -> None:
        """The response is complete; without ``keep_alive`` the connection is to be closed after it."""
        ...

    def cut(self) -> None:
        """Close at once, whatever is under way."""
        ...


class Exchange:
    """Reads the body, sends the response, and calls what was attached when the client leaves or ``abort`` comes.

    Owned by the task that serves the request, which calls ``close`` whatever happens. The connection calls
    ``take_body``, ``body_complete``, ``client_left`` and ``writable``. At most ``max_bytes`` of a body are kept.
    """

    __slots__ = (
        "_body_done",
        "_closed",
        "_continued",
        "_ended",
        "_keep_alive",
        "_leaves",
        "_max_bytes",
        "_parts",
        "_size",
        "_unsent",
        "_waiter",
        "_wire",
        "aborted",
        "chunked",
        "client",
        "head",
        "headers",
        "left",
        "on_writable",
        "started",
    )

    def __init__(self, head: Head, wire: Wire, max_bytes: int) -> None:
        self.head = head
        self.headers = head.headers
        self.client = ""
        """Whose token came with the request; empty where none is asked for."""
        self.left = False
        """Whether the client is gone."""
        self.aborted: WeirError | None = None
        """Why this side ended the exchange."""
        self.started = False
        """Whether the status has been given."""
        self.on_writable: Callable[[], None] | None = None
        """Called when a client that was slow takes more."""
        self.chunked = False
        self._wire = wire
        self._max_bytes = max_bytes
        self._parts: list[bytes] = []
        self._size = 0
        self._body_done = False
        self._continued = head.headers.get(b"expect", b"").lower() != b"100-continue"
        self._waiter: asyncio.Future[None] | None = None
        self._unsent = b""
        self._keep_alive = head.keep_alive
        self._ended = False
        self._closed = False
        self._leaves: list[Callable[[], None]] = []

    # what the connection tells

    def take_body(self, part: bytes) -> None:
        """More of the body."""
        self._continued = True
        self._size += len(part)
        if self._size <= self._max_bytes and not self._ended:
            self._parts.append(part)
            return
        self._parts.clear()
        self._wake()
        if self._size > self._max_bytes + DISCARDED_BYTES:
            self._wire.cut()

    def body_complete(self) -> None:
        """All of the body was taken."""
        self._body_done = True
        self._wake()

    def client_left(self) -> None:
        """The connection is gone."""
        self.left = True
        self._wake()
        if not self._closed:
            self._call_leaves()

    def writable(self) -> None:
        """The client takes more, or nobody waits for it any longer."""
        self._wake()
        if self.on_writable is not None:
            self.on_writable()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def _news(self) -> None:
        """Wait until the connection or ``abort`` tells something."""
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    # the request

    async def read_body(self, *, timeout_s: float) -> bytes:
        """The whole body. Raises HttpRefusal, ClientLeft or, when aborted, that error."""
        declared = self.headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self._max_bytes:
            raise _too_large(int(declared), self._max_bytes)
        if not self._body_done:
            await self._arrival(timeout_s)
        if self._size > self._max_bytes:
            raise _too_large(self._size, self._max_bytes)
        if self.left:
            raise ClientLeft
        return self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)

    async def _arrival(self, timeout_s: float) -> None:
        if not self._continued:
            self._continued = True
            self._wire.write(_CONTINUE)
        try:
            async with asyncio.timeout(timeout_s):
                while not (self._body_done or self.left or self._size > self._max_bytes):
                    if self.aborted is not None:
                        raise self.aborted
                    await self._news()
        except TimeoutError:
            limit = f"the body did not arrive within {timeout_s:g} s"
            raise HttpRefusal(408, limit, code="request_timeout", headers=(("connection", "close"),)) from None

    def attach(self, leave: Callable[[], None]) -> None:
        """Call ``leave`` once the client is gone or the exchange aborted; at once when that is past."""
        self._leaves.append(leave)
        if self.left or self.aborted is not None:
            leave()

    def abort(self, error: WeirError) -> None:
        """End the exchange from this side; the client gets ``error``."""
        if self.aborted is not None:
            return
        self.aborted = error
        self._call_leaves()
        self.writable()

    def _call_leaves(self) -> None:
        for leave in self._leaves:
            leave()

    # the response

    @property
    def paused(self) -> bool:
        """Whether the client is slow; ``on_writable`` is called when it is so no more."""
        return self._wire.paused

    @property
    def complete(self) -> bool:
        """Whether the last part of the response was given."""
        return self._ended

    async def respond(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Send a whole response."""
        self.start(status, {**headers, "content-length": str(len(body))})
        await self.write(body, last=True)

    def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Status and headers, once; they leave with the first part of the body."""
        assert not self.started, "a response starts once"
        self.started = True
        self.chunked = False
        lines = [f"HTTP/1.1 {status} {_REASONS.get(status, '')}\r\n"]
        for name, value in headers.items():
            assert "\n" not in value, f"header {name} would end early"
            lines.append(f"{name}: {value}\r\n")
        if headers.get("connection") == "close":
            self._keep_alive = False
        if "content-length" not in headers:
            if self.head.chunks:
                self.chunked = True
                lines.append("transfer-encoding: chunked\r\n")
            else:
                self._keep_alive = False  # the end of the connection is the end of the body
        if not self._body_done and not self._continued:
            self._keep_alive = False  # whether its body follows is not known
        if not self._keep_alive and "connection" not in headers:
            lines.append("connection: close\r\n")
        self._unsent = "".join(lines).encode("latin-1") + self._wire.date + b"\r\n"

    async def write(self, body: bytes, *, last: bool = False) -> None:
        """Send a part of the body; waits while the client is slow, returns at once when it is gone."""
        self.send(body, last=last)
        while self._wire.paused and not (last or self.left or self.aborted):
            await self._news()

    def send(self, body: bytes, *, last: bool = False) -> None:
        """As ``write``, without waiting: to be used while not ``paused``."""
        assert self.started and not self._ended, "parts come between start and end"  # noqa: PT018
        if self.head.method == "HEAD":
            body = b""
        elif self.chunked:
            if body:
                body = b"%x\r\n%b\r\n" % (len(body), body)
            if last:
                body += _LAST_CHUNK
        if self._unsent:
            body, self._unsent = self._unsent + body, b""
        if body:
            self._wire.write(body)
        if last:
            self._ended = True
            self._parts.clear()
            self._wire.ended(self, keep_alive=self._keep_alive)

    async def refuse(self, refusal: HttpRefusal, headers: Mapping[str, str]) -> None:
        """Answer with an error; nothing may have been sent."""
        await self.respond(refusal.status, {**refusal.headers(), **headers}, refusal.body())

    def close(self) -> None:
        """Leave what is still attached, and cut a response that is not complete. Idempotent; must be harmless to
        what has ended."""
        if self._closed:
            return
        self._closed = True
        self._call_leaves()
        self._leaves.clear()
        self.on_writable = None
        if not self._ended and not self.left:
            self._wire.cut()


def _too_large(size: int, max_bytes: int) -> HttpRefusal:
    return HttpRefusal(413, f"body = {size} bytes: at most {max_bytes} bytes", code="body_too_large")


def check_json_body(headers: Mapping[bytes, bytes]) -> None:
    """Raise HttpRefusal (415) for a body that says it is something other than plain JSON."""
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind not in _JSON_KINDS:
        shown = kind.decode("latin-1")
        message = f"content-type = {shown!r}: must be application/json"
        raise HttpRefusal(415, message, code="unsupported_media_type", param="content-type")
    coding = headers.get(b"content-encoding", b"identity").strip().lower()
    if coding != b"identity":
        message = f"content-encoding = {coding.decode('latin-1')!r}: must be identity"
        raise HttpRefusal(415, message, code="unsupported_media_type", param="content-encoding")
