"""A small HTTP/1.1 client for streamed answers: a general one costs more CPU a chunk than the engine under test."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import urllib.parse
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

from weir.errors import InvalidArgument, Unavailable

PIECE_BYTES = 1 << 16
MAX_HEADER_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()


class HttpAnswer:
    """Status and body of one answer; ``pieces`` gives the body as it arrives, once."""

    def __init__(self, status: int, headers: Mapping[str, str], reader: asyncio.StreamReader) -> None:
        self.status = status
        self.headers = headers
        self.complete = False
        self._reader = reader

    @property
    def reusable(self) -> bool:
        """Whether the connection may carry another request."""
        return self.complete and self.headers.get("connection", "").lower() != "close" and self._framed

    @property
    def _framed(self) -> bool:
        return "content-length" in self.headers or self.headers.get("transfer-encoding", "") == "chunked"

    async def pieces(self) -> AsyncIterator[bytes]:
        """Bytes of the body. Raises Unavailable when the connection ends before the body does."""
        try:
            async for piece in self._body():
                yield piece
        except asyncio.IncompleteReadError:
            raise Unavailable("the connection ended in mid-answer") from None
        self.complete = True

    async def _body(self) -> AsyncIterator[bytes]:
        if self.headers.get("transfer-encoding", "") == "chunked":
            while size := int((await self._reader.readuntil(b"\r\n")).split(b";")[0], 16):
                piece = await self._reader.readexactly(size + 2)
                yield piece[:-2]
            while await self._reader.readuntil(b"\r\n") != b"\r\n":
                pass
        elif "content-length" in self.headers:
            yield await self._reader.readexactly(int(self.headers["content-length"]))
        else:
            while piece := await self._reader.read(PIECE_BYTES):
                yield piece


class HttpClient:
    """Posts to one base URL; connections are kept for the next request."""

    def __init__(self, base_url: str) -> None:
        """Raises InvalidArgument for anything but http://host[:port][/path] or https://."""
        url = urllib.parse.urlsplit(base_url)
        if url.scheme not in {"http", "https"} or not url.hostname:
            raise InvalidArgument("--base-url", base_url, "must be http://host:port")
        self._host = url.hostname
        self._port = url.port or (443 if url.scheme == "https" else 80)
        self._path = url.path.rstrip("/")
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._idle: list[_Connection] = []

    @contextlib.asynccontextmanager
    async def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> AsyncIterator[HttpAnswer]:
        """Send and wait for the answer's head. Raises Unavailable when the server cannot be reached or hangs up."""
        connection = await self._kept() or await self._open()
        answer: HttpAnswer | None = None
        try:
            answer = await self._exchange(connection, path, body, headers)
            yield answer
        finally:
            if answer is not None and answer.reusable:
                self._idle.append(connection)
            else:
                await connection.close()

    async def close(self) -> None:
        """Close idle connections."""
        while self._idle:
            await self._idle.pop().close()

    async def _kept(self) -> _Connection | None:
        """One that the server has not closed meanwhile, as servers do after some seconds (vLLM after 5)."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.reader.at_eof():
                return connection
            await connection.close()
        return None

    async def _open(self) -> _Connection:
        try:
            streams = await asyncio.open_connection(self._host, self._port, ssl=self._tls, limit=MAX_HEADER_BYTES)
        except OSError as error:
            raise Unavailable(f"{self._host}:{self._port}: {error}") from None
        return _Connection(*streams)

    async def _exchange(
        self, connection: _Connection, path: str, body: bytes, headers: Mapping[str, str]
    ) -> HttpAnswer:
        lines = [f"POST {self._path}{path} HTTP/1.1", f"Host: {self._host}:{self._port}"]
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        try:
            connection.writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
            await connection.writer.drain()
            head = await connection.reader.readuntil(b"\r\n\r\n")
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            raise Unavailable(f"{self._host}:{self._port} gave no answer: {error}") from None
        status, received = _parse_head(head)
        return HttpAnswer(status, received, connection.reader)


def _parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    first, *rest = head.decode("latin-1").split("\r\n")
    words = first.split(" ", 2)
    if len(words) < 2 or not words[1].isdigit():
        raise Unavailable(f"not an HTTP answer: {first[:80]!r}")
    pairs = (line.partition(":") for line in rest if line)
    return int(words[1]), {name.strip().lower(): value.strip() for name, _, value in pairs}
