"""Bearer tokens at the router's doors: who a client is, and what it may ask.

The file has a line ``NAME TOKEN`` for each client; a name may have several tokens, so that one can be replaced
without a gap. The name is the client's tenant: it cannot ask in another's name, and does not share cached
prefixes with others. The name ``operator`` may name any tenant, and alone may look at workers, state and traces.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from weir.errors import InvalidArgument, PermissionDenied, Unauthenticated, WeirError
from weir.rpc.interceptors import HANDLER_FORMS
from weir.rpc.status import abort_with

OPERATOR = "operator"
HEADER = "authorization"
MIN_TOKEN_CHARS = 16
MAX_TOKENS = 100_000
_SCHEME = "bearer "

if TYPE_CHECKING:
    _ServerInterceptor = grpc.aio.ServerInterceptor[Any, Any]
else:  # generic in the type stubs only
    _ServerInterceptor = grpc.aio.ServerInterceptor


class TokenBook:
    """Names by token. Holds digests: a comparison tells an attacker's clock nothing about a token."""

    def __init__(self, tokens: Iterable[tuple[str, str]]) -> None:
        """``tokens`` are pairs of name and token."""
        self._names = {_digest(token): name for name, token in tokens}

    @classmethod
    def read(cls, path: str) -> TokenBook:
        """From a file; empty lines and lines that begin with # do not count.

        Raises InvalidArgument that names the line (never the token).
        """
        pairs: list[tuple[str, str]] = []
        for number, line in enumerate(_lines(path), start=1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            field = f"security.tokens_file line {number}"
            if len(words) != 2:
                raise InvalidArgument(field, f"{len(words)} words", "must be NAME TOKEN")
            if len(words[1]) < MIN_TOKEN_CHARS:
                raise InvalidArgument(field, words[0], f"its token has under {MIN_TOKEN_CHARS} characters")
            pairs.append((words[0], words[1]))
        if not 0 < len(pairs) <= MAX_TOKENS:
            raise InvalidArgument("security.tokens_file", path, f"must hold 1 to {MAX_TOKENS} tokens")
        if len({token for _, token in pairs}) < len(pairs):
            raise InvalidArgument("security.tokens_file", path, "a token stands in it twice")
        return cls(pairs)

    def name_of(self, authorization: str) -> str:
        """Whose the header ``Bearer TOKEN`` is. Raises Unauthenticated."""
        if not authorization:
            raise Unauthenticated("a bearer token is needed: authorization: Bearer TOKEN")
        if not authorization.lower().startswith(_SCHEME):
            raise Unauthenticated("the authorization must be a bearer token")
        name = self._names.get(_digest(authorization[len(_SCHEME) :].strip()))
        if name is None:
            raise Unauthenticated("the bearer token is not known here")
        return name


def tenant_for(name: str, asked: str) -> str:
    """The tenant that ``name`` asks as, when the request says ``asked``. Raises PermissionDenied."""
    if name == OPERATOR or asked == name:
        return asked
    if asked:
        raise PermissionDenied(f"tenant = {asked!r}: this token belongs to {name!r}")
    return name


def require_operator(name: str, what: str) -> None:
    """Raises PermissionDenied unless ``name`` may look at ``what``."""
    if name != OPERATOR:
        raise PermissionDenied(f"{what}: only a token of {OPERATOR!r} may, not one of {name!r}")


class TokenInterceptor(_ServerInterceptor):
    """Refuses calls without a good token, before any handler sees them; ``open_prefixes`` need none."""

    def __init__(
        self, book: TokenBook, *, open_prefixes: tuple[str, ...], operator_methods: frozenset[str] = frozenset()
    ) -> None:
        self._book = book
        self._open = open_prefixes
        self._operator_methods = operator_methods

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """The call's handler, or one of the same kind that refuses it."""
        handler: Any = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(self._open):
            return handler  # type: ignore[no-any-return]
        try:
            name = self._book.name_of(authorization_in(handler_call_details.invocation_metadata))
            if method in self._operator_methods:
                require_operator(name, method.rpartition("/")[2])
        except WeirError as error:
            return _refusing(handler, error)
        return handler  # type: ignore[no-any-return]


def authorization_in(metadata: Any) -> str:
    """The authorization that a call came with, or an empty text."""
    return next((value for key, value in metadata or () if key == HEADER and isinstance(value, str)), "")


def _refusing(handler: Any, error: WeirError) -> grpc.RpcMethodHandler[Any, Any]:
    async def refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await abort_with(context, error)

    make: Any = HANDLER_FORMS[bool(handler.request_streaming), bool(handler.response_streaming)][1]
    made: grpc.RpcMethodHandler[Any, Any] = make(
        refuse,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )
    return made


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument("security.tokens_file", path, f"cannot be read: {error}") from None
