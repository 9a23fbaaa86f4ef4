"""The one mapping between Weir's errors and gRPC's statuses, both ways, losing neither class nor fields.

On the wire: the status code, the error's text as details, and trailing metadata: ``weir-error`` (class name),
``weir-<attribute>`` for its attributes (percent-encoded), ``retry-after-ms`` when a wait is known.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio

from weir import errors
from weir.errors import WeirError

MAX_DETAILS_CHARS = 1_024
MAX_ATTRIBUTE_CHARS = 256
RETRY_AFTER_KEY = "retry-after-ms"
CLASS_KEY = "weir-error"

E = TypeVar("E", bound=WeirError)

_CLASSES: dict[str, type[WeirError]] = {
    name: value for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, WeirError)
}

_ATTRIBUTES: dict[type[WeirError], tuple[str, ...]] = {
    errors.InvalidArgument: ("field", "value", "limit"),
    errors.NotFound: ("kind", "name"),
    errors.ModelError: ("file", "tensor", "expectation"),
    errors.FingerprintMismatch: ("field", "ours", "theirs"),
    errors.KvReadVoid: ("reason", "detail"),
}

# What a status means when the peer did not name a class of ours (a proxy, or gRPC itself).
_FOREIGN: dict[grpc.StatusCode, type[WeirError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidArgument,
    grpc.StatusCode.OUT_OF_RANGE: errors.InvalidArgument,
    grpc.StatusCode.NOT_FOUND: errors.NotFound,
    grpc.StatusCode.FAILED_PRECONDITION: errors.FailedPrecondition,
    grpc.StatusCode.UNIMPLEMENTED: errors.FailedPrecondition,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.ResourceExhausted,
    grpc.StatusCode.UNAVAILABLE: errors.Unavailable,
    grpc.StatusCode.ABORTED: errors.Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.CANCELLED: errors.RequestCancelled,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: errors.PermissionDenied,
}


def status_code(error: WeirError) -> grpc.StatusCode:
    """The gRPC status of ``error``."""
    return grpc.StatusCode.__members__.get(error.code, grpc.StatusCode.UNKNOWN)


def error_metadata(error: WeirError) -> tuple[tuple[str, str], ...]:
    """Trailing metadata that carries class and attributes of ``error``."""
    known = _known_class(error)
    pairs = [(CLASS_KEY, known.__name__)]
    for attribute in _ATTRIBUTES.get(known, ()):
        text = str(getattr(error, attribute))[:MAX_ATTRIBUTE_CHARS]
        pairs.append((f"weir-{attribute}", urllib.parse.quote(text, safe=" /:,;=()[]<>+")))
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is not None:
        pairs.append((RETRY_AFTER_KEY, str(max(0, round(retry_after_s * 1_000)))))
    return tuple(pairs)


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], error: WeirError) -> NoReturn:
    """End the call with ``error``; always raises (gRPC's AbortError)."""
    await context.abort(status_code(error), str(error)[:MAX_DETAILS_CHARS], error_metadata(error))
    raise AssertionError("abort returned")


def from_rpc_error(error: grpc.RpcError) -> WeirError:
    """The error that the peer raised: the same class with the same text and attributes.

    Attributes come back as texts. A status without a class of ours becomes the class that means the same;
    InternalError when none does.
    """
    code, details, trailing = _parts(error)
    metadata = _metadata(trailing)
    cls = _CLASSES.get(metadata.get(CLASS_KEY, "")) or _FOREIGN.get(code, errors.InternalError)
    rebuilt = _rebuild(cls, details or code.name)
    for attribute in _ATTRIBUTES.get(cls, ()):
        setattr(rebuilt, attribute, urllib.parse.unquote(metadata.get(f"weir-{attribute}", "")))
    if isinstance(rebuilt, errors.ResourceExhausted):
        rebuilt.retry_after_s = _retry_after_s(metadata)
    return rebuilt


def _known_class(error: WeirError) -> type[WeirError]:
    return next(cls for cls in type(error).__mro__ if cls.__name__ in _CLASSES and issubclass(cls, WeirError))


def _rebuild(cls: type[E], details: str) -> E:
    # The constructors compose the text from their arguments; here the text is already composed.
    rebuilt = cls.__new__(cls)
    Exception.__init__(rebuilt, details)
    return rebuilt


def _retry_after_s(metadata: Mapping[str, str]) -> float | None:
    text = metadata.get(RETRY_AFTER_KEY, "")
    return int(text) / 1_000 if text.isascii() and text.isdigit() else None


def _parts(error: grpc.RpcError) -> tuple[grpc.StatusCode, str, Iterable[Any]]:
    # Both the sync and the aio error are calls as well; neither base class says so in its type.
    call: Any = error
    return call.code() or grpc.StatusCode.UNKNOWN, call.details() or "", call.trailing_metadata() or ()


def _metadata(trailing: Iterable[Any]) -> dict[str, str]:
    return {key: value for key, value in trailing if isinstance(value, str)}
