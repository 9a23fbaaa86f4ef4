"""Calls over a simulated connection: what ``grpc.aio`` gives to stubs on one side and to servicers on the other."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from weir.errors import WeirError
from weir.rpc.status import status_code

if TYPE_CHECKING:
    from tests.simulation.network import Connection

_EOF: object = getattr(grpc.aio, "EOF")  # noqa: B009 (absent from the type stubs)


def rpc_error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    """An error as gRPC raises it."""
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details, details)


class ClientCall:
    """A stream as its client sees it."""

    def __init__(self, connection: Connection, path: str, serialize: Any, deserialize: Any) -> None:
        self._connection = connection
        self._number = next(connection.network.numbers)
        self._serialize = serialize
        self._deserialize = deserialize
        self._inbox: deque[bytes] = deque()
        self._end: object | None = None
        self._wake = asyncio.Event()
        connection.calls[self._number] = self
        connection.to_server("begin", self._number, (path, None))

    async def write(self, message: Any) -> None:
        """Send; raises when the call is over."""
        if self._end is not None:
            self._raise_end("the call is over")
        self._connection.to_server("message", self._number, self._serialize(message))
        await asyncio.sleep(0)

    async def read(self) -> Any:
        """The next message, EOF, or the error that ended the call."""
        while not self._inbox:
            if self._end is not None:
                if self._end is _EOF:
                    return _EOF
                self._raise_end("the call is over")
            self._wake.clear()
            await self._wake.wait()
        return self._deserialize(self._inbox.popleft())

    async def details(self) -> str:
        """Text of the status."""
        return "ended by the server"

    def cancel(self) -> bool:
        """End it from this side."""
        if self._end is None:
            self._finish(rpc_error(grpc.StatusCode.CANCELLED, "cancelled"))
            self._connection.to_server("cancel", self._number)
        return True

    def take(self, kind: str, payload: Any) -> None:
        """Something arrived."""
        if self._end is not None:
            return
        if kind == "message":
            self._inbox.append(payload)
            self._wake.set()
        else:
            code, details = payload
            self._finish(_EOF if code is grpc.StatusCode.OK else rpc_error(code, details))

    def failed(self, reason: str) -> None:
        """The connection is broken."""
        if self._end is None:
            self._finish(rpc_error(grpc.StatusCode.UNAVAILABLE, reason))

    def _finish(self, end: object) -> None:
        self._end = end
        self._connection.calls.pop(self._number, None)
        self._wake.set()

    def _raise_end(self, text: str) -> None:
        if isinstance(self._end, grpc.aio.AioRpcError):
            raise self._end
        raise asyncio.InvalidStateError(text)


class UnaryCall:
    """One message each way; ``answer`` is a future of the serialized response."""

    def __init__(self, connection: Connection, path: str, request: bytes) -> None:
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._connection = connection
        self._number = next(connection.network.numbers)
        connection.calls[self._number] = self
        connection.to_server("begin", self._number, (path, request))

    def take(self, kind: str, payload: Any) -> None:
        """The answer, or a status."""
        if self.answer.done():
            return
        if kind == "message":
            self.answer.set_result(payload)
        elif payload[0] is not grpc.StatusCode.OK:
            self.answer.set_exception(rpc_error(*payload))

    def failed(self, reason: str) -> None:
        """The connection is broken."""
        if not self.answer.done():
            self.answer.set_exception(rpc_error(grpc.StatusCode.UNAVAILABLE, reason))


class _Context:
    def __init__(self) -> None:
        self.callbacks: list[Callable[[Any], None]] = []

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self.callbacks.append(callback)

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()


class ServerCall:
    """A call as the server runs it. ``cancels``: whether the handler is cancelled when the client is gone, or
    left suspended for ever; gRPC does either.
    """

    def __init__(self, connection: Connection, number: int, handler: Any, cancels: bool) -> None:
        self._connection = connection
        self._number = number
        self._handler = handler
        self._cancels = cancels
        self._context = _Context()
        self._inbox: asyncio.Queue[bytes] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._over = False

    def begin(self, request: bytes | None) -> None:
        """Start the handler, in its process."""
        if not self._over:
            run = self._stream() if request is None else self._unary(request)
            self._task = asyncio.get_running_loop().create_task(run)

    def take(self, payload: bytes) -> None:
        """A message of the client."""
        self._inbox.put_nowait(payload)

    def client_gone(self) -> None:
        """The client has cancelled, or the connection is broken."""
        if self._over:
            return
        self._end()
        if self._task is not None and self._cancels:
            self._task.cancel()

    def stop(self) -> None:
        """The server cancels it."""
        if not self._over:
            self._end()
            if self._task is not None:
                self._task.cancel()

    def _end(self) -> None:
        self._over = True
        self._connection.served.pop(self._number, None)
        callbacks, self._context.callbacks = self._context.callbacks, []
        for callback in callbacks:
            callback(self._context)

    async def _requests(self) -> AsyncIterator[Any]:
        while True:
            yield self._handler.request_deserializer(await self._inbox.get())

    async def _stream(self) -> None:
        async def run() -> None:
            async for response in self._handler.stream_stream(self._requests(), self._context):
                self._answer(response)

        await self._guarded(run())

    async def _unary(self, request: bytes) -> None:
        async def run() -> None:
            self._answer(await self._handler.unary_unary(self._handler.request_deserializer(request), self._context))

        await self._guarded(run())

    def _answer(self, response: Any) -> None:
        if not self._over:
            self._connection.to_client("message", self._number, self._handler.response_serializer(response))

    async def _guarded(self, run: Any) -> None:
        status = (grpc.StatusCode.OK, "")
        try:
            await run
        except WeirError as error:
            status = (status_code(error), str(error))
        except Exception as error:
            self._connection.network.loop.faults.append(f"handler: {type(error).__name__}: {error}")
            status = (grpc.StatusCode.UNKNOWN, str(error))
        if not self._over:
            self._connection.to_client("status", self._number, status)
            self._end()
