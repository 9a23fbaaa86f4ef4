"""One HTTP request and its response on ASGI, watching all the while whether the client is still there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from starlette.types import Receive, Send

from weir.errors import WeirError
from weir.services.router.openai_errors import HttpRefusal

_JSON_KINDS = (b"application/json", b"")


class ClientLeft(Exception):
    """The client went away before its request was read."""


class Exchange:
    """Reads the body, sends the response, and calls what was attached when the client leaves or ``abort`` comes.

    Owned by the task that serves the request, which calls ``close`` whatever happens.
    """

    def __init__(self, headers: Mapping[bytes, bytes], receive: Receive, send: Send) -> None:
        self.headers = headers
        self.client = ""
        """Whose token came with the request; empty where none is asked for."""
        self.left = False
        """Whether the client is gone."""
        self.aborted: WeirError | None = None
        """Why this side ended the exchange."""
        self.started = False
        """Whether the status has been sent."""
        self._receive = receive
        self._send = send
        self._leaves: list[Callable[[], None]] = []
        self._watcher: asyncio.Task[None] | None = None
        self._reading: asyncio.Timeout | None = None

    async def read_body(self, *, max_bytes: int, timeout_s: float) -> bytes:
        """The whole body, then watch the client. Raises HttpRefusal, ClientLeft or, when aborted, that error."""
        declared = self.headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > max_bytes:
            raise _too_large(int(declared), max_bytes)
        try:
            async with asyncio.timeout(timeout_s) as self._reading:
                body = await self._gather(max_bytes)
        except TimeoutError:
            if self.aborted is not None:
                raise self.aborted from None
            limit = f"the body did not arrive within {timeout_s:g} s"
            raise HttpRefusal(408, limit, code="request_timeout", headers=(("connection", "close"),)) from None
        finally:
            self._reading = None
        self._watcher = asyncio.get_running_loop().create_task(self._watch())
        return body

    async def _gather(self, max_bytes: int) -> bytes:
        parts: list[bytes] = []
        size = 0
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.left = True
                raise ClientLeft
            part = message.get("body", b"")
            size += len(part)
            if size > max_bytes:
                raise _too_large(size, max_bytes)
            parts.append(part)
            more = message.get("more_body", False)
        return b"".join(parts)

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.left = True
        self._call_leaves()

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
        if self._reading is not None:
            self._reading.reschedule(asyncio.get_running_loop().time())

    def _call_leaves(self) -> None:
        for leave in self._leaves:
            leave()

    async def respond(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Send a whole response."""
        await self.start(status, {**headers, "content-length": str(len(body))})
        await self.write(body, last=True)

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Send status and headers, once."""
        assert not self.started, "a response starts once"
        self.started = True
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def write(self, body: bytes, *, last: bool = False) -> None:
        """Send a part of the body; waits while the client is slow, returns at once when it is gone."""
        await self._send({"type": "http.response.body", "body": body, "more_body": not last})

    async def refuse(self, refusal: HttpRefusal, headers: Mapping[str, str]) -> None:
        """Answer with an error; nothing may have been sent."""
        await self.respond(refusal.status, {**refusal.headers(), **headers}, refusal.body())

    def close(self) -> None:
        """Stop watching and leave what is still attached. Idempotent; must be harmless to what has ended."""
        if self._watcher is not None:
            self._watcher.cancel()
        self._call_leaves()
        self._leaves.clear()


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
