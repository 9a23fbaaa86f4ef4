"""One client's connection: bytes become requests, one after the other; llhttp (httptools) reads them.

data ─► parser ─► head complete: an Exchange ─► served, in order; those behind it wait, and nothing more is read
                  body ─► the Exchange it belongs to
response complete ─► the next one, or idle until ``idle_since_s`` is too long ago, or closed
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol, cast
from urllib.parse import unquote

import httptools

from weir.services.router.http_exchange import Exchange, Head
from weir.services.router.openai_errors import HttpRefusal

MAX_HEAD_BYTES = 64 << 10
MAX_PIPELINED = 32
_BAD = "HTTP/1.1 {status}\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: {size}\r\nconnection: close\r\n"
_NO_HTTP = ("400 Bad Request", "this is not HTTP/1.1")
_TOO_LONG = ("431 Request Header Fields Too Large", f"at most {MAX_HEAD_BYTES} bytes of headers")


class ConnectionOwner(Protocol):
    """Who serves; ``max_body_bytes`` and ``date`` are read for every request."""

    max_body_bytes: int
    date: bytes

    def opened(self, connection: HttpConnection) -> None:
        """A client has come."""
        ...

    def closed(self, connection: HttpConnection) -> None:
        """It is gone."""
        ...

    def serve(self, exchange: Exchange, unwelcome: HttpRefusal | None) -> None:
        """Begin to answer a request; ``unwelcome``: of a connection that there was no room for."""
        ...


class HttpConnection(asyncio.Protocol):
    """See the module. A ``Wire``. The callbacks of the parser begin with ``on_``."""

    def __init__(self, owner: ConnectionOwner, loop: asyncio.AbstractEventLoop) -> None:
        self.paused = False
        self.unwelcome: HttpRefusal | None = None
        """What its requests are answered with, if there was no room for it when it came."""
        self.idle_since_s = loop.time()
        """When its last response was complete; of use only while ``idle``."""
        self._owner = owner
        self._loop = loop
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._head_bytes = 0  # that came for a head which is not complete
        self._fields_bytes = 0
        self._in_head = True
        self._arriving: Exchange | None = None
        self._serving: Exchange | None = None
        self._waiting: deque[Exchange] = deque()
        self._last = False
        self._deaf = False

    @property
    def date(self) -> bytes:
        """See Wire."""
        return self._owner.date

    @property
    def idle(self) -> bool:
        """Whether nothing is being answered."""
        return self._serving is None

    def finish(self) -> None:
        """Close it: now when idle, else after the response under way."""
        self._last = True
        if self.idle:
            self.cut_gently()

    def cut_gently(self) -> None:
        """Close once all that was written has left."""
        self._deaf = True
        if self._transport is not None:
            self._transport.close()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by inheritance
        self._owner.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.paused = False
        serving, self._serving = self._serving, None
        self._waiting.clear()
        self._owner.closed(self)
        if serving is not None:
            serving.client_left()

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        if self._in_head:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._deaf = self._last = True  # the request is answered as if it had not asked for another protocol
        except httptools.HttpParserError:
            self._refuse(*(_TOO_LONG if self._fields_bytes > MAX_HEAD_BYTES else _NO_HTTP))
            return
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(*_TOO_LONG)

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        if self._serving is not None:
            self._serving.writable()

    # the parser

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers = {}
        self._fields_bytes = 0
        self._in_head = True

    def on_url(self, part: bytes) -> None:
        self._url += part
        self._fields_bytes += len(part)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value
        self._fields_bytes += len(name) + len(value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        parser = self._parser
        new = parser.get_http_version() == "1.1"
        if (new and b"host" not in self._headers) or self._fields_bytes > MAX_HEAD_BYTES:
            raise ValueError("no request")  # becomes an HttpParserError
        keep_alive = new and parser.should_keep_alive()
        head = Head(parser.get_method().decode("ascii"), _path(self._url), self._headers, keep_alive, new)
        if len(self._waiting) >= MAX_PIPELINED:
            raise ValueError("too many requests at once")
        exchange = self._arriving = Exchange(head, self, self._owner.max_body_bytes)
        if self._serving is None:
            self._serve(exchange)
        else:
            self._waiting.append(exchange)
            self._pause_reading()

    def on_body(self, part: bytes) -> None:
        if self._arriving is not None:
            self._arriving.take_body(part)

    def on_message_complete(self) -> None:
        self._in_head = True
        arriving, self._arriving = self._arriving, None
        if arriving is not None:
            arriving.body_complete()

    # Wire

    def write(self, data: bytes) -> None:
        """See Wire."""
        if self._transport is not None:
            self._transport.write(data)

    def ended(self, exchange: Exchange, *, keep_alive: bool) -> None:
        """See Wire."""
        if exchange is not self._serving:
            return
        self._serving = None
        if keep_alive and self._waiting:
            self._serve(self._waiting.popleft())
            if not self._waiting and self._transport is not None:
                self._transport.resume_reading()
        elif not keep_alive or self._last:
            self.finish()
        else:
            self.idle_since_s = self._loop.time()

    def cut(self) -> None:
        """See Wire."""
        self._last = True
        if self._transport is not None:
            self._transport.abort()

    def _serve(self, exchange: Exchange) -> None:
        self._serving = exchange
        self._owner.serve(exchange, self.unwelcome)

    def _pause_reading(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def _refuse(self, status: str, why: str) -> None:
        """What came is no request: answer what came before it, then close; nothing is read any more."""
        self._deaf = self._last = True
        arriving, self._arriving = self._arriving, None
        if arriving is not None and arriving is not self._serving:
            self._waiting.remove(arriving)
        elif arriving is not None:
            self._serving = None
            self._waiting.clear()
            arriving.client_left()
        if self.idle:
            if arriving is None:
                head = _BAD.format(status=status, size=len(why))
                self.write(head.encode() + self.date + b"\r\n" + why.encode())
            self.cut_gently()


def _path(url: bytes) -> str:
    """The path of a request's target, decoded; ValueError when there is none."""
    if not url.startswith(b"/") or b"?" in url or b"#" in url:
        try:
            url = httptools.parse_url(url).path or b"/"
        except httptools.HttpParserInvalidURLError:
            url = url.partition(b"?")[0]
    text = url.decode("latin-1")
    return unquote(text) if "%" in text else text
