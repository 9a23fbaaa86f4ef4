"""Wraps every handler of a server: errors become statuses, faults are logged and never shown.

Handlers come in four kinds (unary or stream in, unary or stream out) and stream out in two forms (a coroutine
that writes, an async generator). grpc.aio leaves an async generator suspended when its client goes away; here
generators are driven from a coroutine, so that leaving closes them at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from weir.errors import InternalError, WeirError
from weir.rpc.health import PATH_PREFIX
from weir.rpc.status import abort_with

_log = logging.getLogger(__name__)

if TYPE_CHECKING:
    _ServerInterceptor = grpc.aio.ServerInterceptor[Any, Any]
else:  # generic in the type stubs only
    _ServerInterceptor = grpc.aio.ServerInterceptor

Context = grpc.aio.ServicerContext[Any, Any]
Behavior = Callable[[Any, Context], Awaitable[Any]]


class ErrorInterceptor(_ServerInterceptor):
    """Maps what handlers raise: WeirError to its status, anything else to INTERNAL without a trace of it.

    ``admit(peer)`` is called before each handler but those of health, and may raise what the call shall end with.
    """

    def __init__(self, admit: Callable[[str], None] | None = None) -> None:
        self._admit = admit
        self._made: dict[str, tuple[Any, grpc.RpcMethodHandler[Any, Any]]] = {}
        """By method: a handler of the server, and itself wrapped."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """The handler of the call, wrapped; None (unimplemented) stays None."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return handler  # type: ignore[return-value]
        method = handler_call_details.method
        known = self._made.get(method)
        if known is None or known[0] is not handler:
            made = _wrapped(handler, method, None if method.startswith(PATH_PREFIX) else self._admit)
            known = self._made[method] = (handler, made)
        return known[1]


HANDLER_FORMS = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}


def _wrapped(handler: Any, method: str, admit: Callable[[str], None] | None) -> grpc.RpcMethodHandler[Any, Any]:
    kind, make = HANDLER_FORMS[bool(handler.request_streaming), bool(handler.response_streaming)]
    behavior = getattr(handler, kind)
    if inspect.isasyncgenfunction(behavior):
        behavior = _driven(behavior)
    # Plain functions would run on gRPC's thread pool, outside this mapping.
    assert inspect.iscoroutinefunction(behavior), f"{method}: handlers are async"
    return make(
        _guarded(behavior, method, admit),
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


def _driven(behavior: Callable[[Any, Context], AsyncGenerator[Any, None]]) -> Behavior:
    @functools.wraps(behavior)
    async def drive(request: Any, context: Context) -> None:
        async with contextlib.aclosing(behavior(request, context)) as messages:
            async for message in messages:
                await context.write(message)

    return drive


def _guarded(behavior: Behavior, method: str, admit: Callable[[str], None] | None) -> Behavior:
    @functools.wraps(behavior)
    async def guard(request: Any, context: Context) -> Any:
        try:
            if admit is not None:
                admit(context.peer())
            return await behavior(request, context)
        except grpc.aio.AbortError:
            raise
        except WeirError as error:
            if isinstance(error, InternalError):
                _log.exception("internal error in %s", method)
            await abort_with(context, error)
        except Exception as error:
            if context.cancelled():
                # The peer is gone: writes to it fail, and nobody is left to tell.
                raise asyncio.CancelledError from error
            _log.exception("unexpected error in %s", method)
            await abort_with(context, InternalError(f"internal error in {method}; see the server's log"))

    return guard
