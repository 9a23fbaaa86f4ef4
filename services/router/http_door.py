"""The OpenAI-compatible HTTP door: routes, and one request's way through the router.

The status is sent with the first token: what fails before it is an HTTP error; what fails after it is a chunk
``data: {"error": ...}`` and the stream ends without ``[DONE]``.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import orjson

from weir.errors import InternalError, ResourceExhausted, Unavailable, WeirError
from weir.rpc.descriptors import Descriptors
from weir.rpc.tokens import HEADER, TokenBook, require_operator, tenant_for
from weir.services.router.answer import Delta, Final
from weir.services.router.generation import Generation
from weir.services.router.http_exchange import ClientLeft, Exchange, check_json_body
from weir.services.router.http_labels import Labels, parse_labels
from weir.services.router.http_server import HttpServer, TlsPair
from weir.services.router.http_stream import Outflow, SseStream
from weir.services.router.http_ui import ui_routes
from weir.services.router.openai_errors import HttpRefusal, refusal_of
from weir.services.router.openai_logprobs import Piece
from weir.services.router.openai_requests import Call, parse_chat, parse_completion, require_object
from weir.services.router.openai_responses import SseAnswer, WholeAnswer, model_body, sse_error
from weir.services.router.router import Router

_log = logging.getLogger(__name__)

_JSON = {"content-type": "application/json"}
_SSE = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
_MODELS = "/v1/models/"
_READ = ("GET", "HEAD")
_OPEN_PATHS = frozenset({"/health", "/ui", "/ui/page.css", "/ui/chat.js", "/ui/page.js", "/ui/token.js"})
"""What needs no token: a probe, and the page's own files."""
_OPERATOR_PATHS = frozenset({"/metrics", "/ui/state"})

Handler = Callable[[Exchange], Awaitable[None]]
Parse = Callable[[Mapping[str, Any], Labels], Call]


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Bounds of the door."""

    body_bytes: int = 2 << 20
    body_timeout_s: float = 30.0
    open_requests: int = 4_096
    keep_alive_s: float = 30.0
    stalled_client_s: float = 60.0


class HttpDoor:
    """Serves OpenAI's HTTP API from ``router``, on its event loop. ``start`` once, ``stop`` once.

    ``piece`` gives the bytes of a token of a model (``Tokenizer.token_bytes(False)``), for log-probabilities;
    ``healthy`` None, or the reason why no request can be served; ``metrics`` body and content type.
    """

    def __init__(
        self,
        router: Router,
        *,
        piece: Piece,
        healthy: Callable[[], str | None],
        metrics: Callable[[], tuple[bytes, str]],
        limits: HttpLimits | None = None,
        tokens: TokenBook | None = None,
        tls: TlsPair | None = None,
        ui: bool = True,
        descriptors: Descriptors | None = None,
    ) -> None:
        """``tokens`` None asks nobody for a token; ``tls`` None speaks plain HTTP; without ``ui`` there is no page.

        ``descriptors`` None takes clients until there is none left.
        """
        self._router = router
        self._tokens = tokens
        self._piece = piece
        self._healthy = healthy
        self._metrics = metrics
        self._limits = limits or HttpLimits()
        self._server = HttpServer(
            self._serve,
            max_body_bytes=self._limits.body_bytes,
            keep_alive_s=self._limits.keep_alive_s,
            stalled_client_s=self._limits.stalled_client_s,
            tls=tls,
            room=self._room,
        )
        self._descriptors = descriptors
        self._outflow = Outflow()
        self._open: set[Exchange] = set()
        self._stopping = False
        self._routes: dict[str, tuple[tuple[str, ...], Handler]] = {
            "/v1/chat/completions": (("POST",), lambda exchange: self._generate(exchange, parse_chat)),
            "/v1/completions": (("POST",), lambda exchange: self._generate(exchange, parse_completion)),
            "/v1/models": (_READ, self._models),
            "/health": (_READ, self._health),
            "/metrics": (_READ, self._show_metrics),
        }
        if ui:
            self._routes |= {path: (_READ, handler) for path, handler in ui_routes(router).items()}

    @property
    def open_requests(self) -> int:
        """Requests whose response is not complete."""
        return len(self._open)

    async def start(self, bind: str) -> str:
        """Listen on ``host:port``; returns the address with the real port. Raises Unavailable."""
        return await self._server.start(bind)

    async def stop(self, grace_s: float) -> None:
        """Listen no more, give open requests ``grace_s`` seconds, then end them with an error. Idempotent."""
        self._stopping = True
        await self._server.stop(grace_s, self._abort_open)

    def _abort_open(self) -> None:
        for exchange in list(self._open):
            exchange.abort(Unavailable("the router is stopping"))

    async def _serve(self, exchange: Exchange) -> None:
        """Answer one request."""
        method, path = exchange.head.method, exchange.head.path
        try:
            handler = self._handler(method, path)
            if self._tokens is not None and path not in _OPEN_PATHS:
                exchange.client = client_of(self._tokens, exchange.headers, path)
            if self._stopping:
                raise Unavailable("the router is stopping")
            if len(self._open) >= self._limits.open_requests:
                raise ResourceExhausted(f"{len(self._open)} requests are open: at most {self._limits.open_requests}")
        except (HttpRefusal, WeirError) as error:
            await exchange.refuse(_as_refusal(error), {})
            return
        self._open.add(exchange)
        try:
            await handler(exchange)
        finally:
            self._open.discard(exchange)

    def _room(self, held: int) -> HttpRefusal | None:
        """What a new client is told when ``held`` others are connected and there is no room for it."""
        try:
            if self._descriptors is not None:
                self._descriptors.check("http", "a new client", held)
        except ResourceExhausted as error:
            close = (("connection", "close"),)
            return HttpRefusal(503, str(error), code="no_room", retry_after_s=error.retry_after_s, headers=close)
        return None

    def _handler(self, method: str, path: str) -> Handler:
        methods, handler = self._routes.get(path, ((), None))
        if handler is None and path.startswith(_MODELS):
            methods, handler = _READ, lambda exchange: self._model(exchange, path[len(_MODELS) :])
        if handler is None:
            raise HttpRefusal(404, f"there is no {path!r} here", code="unknown_url")
        if method not in methods:
            allowed = ", ".join(methods)
            message = f"{method} is not allowed on {path}: use {allowed}"
            raise HttpRefusal(405, message, code="method_not_allowed", headers=(("allow", allowed),))
        return handler

    async def _models(self, exchange: Exchange) -> None:
        models = [model_body(model) for model in self._router.models()]
        await exchange.respond(200, _JSON, orjson.dumps({"object": "list", "data": models}))

    async def _model(self, exchange: Exchange, name: str) -> None:
        known = {model.name: model for model in self._router.models()}
        if name in known:
            await exchange.respond(200, _JSON, orjson.dumps(model_body(known[name])))
            return
        message = f"model = {name!r}: must be one of: {', '.join(known)}"
        await exchange.refuse(HttpRefusal(404, message, code="model_not_found", param="model"), {})

    async def _health(self, exchange: Exchange) -> None:
        reason = self._healthy()
        if reason is None:
            await exchange.respond(200, _JSON, b'{"status":"ok"}')
        else:
            await exchange.respond(503, _JSON, orjson.dumps({"status": "unavailable", "reason": reason}))

    async def _show_metrics(self, exchange: Exchange) -> None:
        body, content_type = self._metrics()
        await exchange.respond(200, {"content-type": content_type}, body)

    async def _generate(self, exchange: Exchange, parse: Parse) -> None:
        """One answer. Whatever ends it early reaches the client in the form that is still possible."""
        headers: dict[str, str] = {}
        try:
            call = await self._read_call(exchange, parse)
            generation = await self._router.generate(call.ask, on_leave=exchange.attach)
            headers["x-request-id"] = generation.accepted.request_id
            exchange.attach(generation.leave)
            answer = self._stream if call.stream else self._whole
            await answer(exchange, call, generation, headers)
        except ClientLeft:
            return
        except (HttpRefusal, WeirError) as error:
            await self._fail(exchange, error, headers)
        except Exception:
            _log.exception("request %s failed", headers.get("x-request-id", "(not admitted)"))
            await self._fail(exchange, InternalError("an unexpected fault of the router; see its log"), headers)

    async def _fail(self, exchange: Exchange, error: HttpRefusal | WeirError, headers: Mapping[str, str]) -> None:
        if exchange.left:
            return
        refusal = _as_refusal(exchange.aborted or error)
        if exchange.started:
            await exchange.write(sse_error(refusal.body()), last=True)
        else:
            await exchange.refuse(refusal, headers)

    async def _read_call(self, exchange: Exchange, parse: Parse) -> Call:
        check_json_body(exchange.headers)
        body = await exchange.read_body(timeout_s=self._limits.body_timeout_s)
        try:
            values = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise HttpRefusal(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
        labels = parse_labels(exchange.headers)
        if exchange.client:
            labels = replace(labels, tenant=tenant_for(exchange.client, labels.tenant))
        return parse(require_object(values), labels)

    async def _stream(self, exchange: Exchange, call: Call, generation: Generation, headers: Mapping[str, str]) -> None:
        answer = SseAnswer(call, generation.accepted, self._piece)
        if not await SseStream(self._outflow, exchange, generation, answer, {**_SSE, **headers}).run():
            _check_ended(exchange)

    async def _whole(self, exchange: Exchange, call: Call, generation: Generation, headers: Mapping[str, str]) -> None:
        answer = WholeAnswer(call, generation.accepted, self._piece)
        async for event in generation:
            if type(event) is Delta:
                answer.add(event)
            elif type(event) is Final:
                ttft = {"x-weir-ttft-ms": f"{event.timings.ttft_ms:.3f}"}
                await exchange.respond(200, {**_JSON, **headers, **ttft}, answer.body(event))
                return
        _check_ended(exchange)


def client_of(tokens: TokenBook, headers: Mapping[bytes, bytes], path: str) -> str:
    """Whose token the request carries. Raises Unauthenticated, PermissionDenied."""
    name = tokens.name_of(headers.get(HEADER.encode(), b"").decode("latin-1"))
    if path in _OPERATOR_PATHS:
        require_operator(name, path)
    return name


def _as_refusal(error: HttpRefusal | WeirError) -> HttpRefusal:
    return error if isinstance(error, HttpRefusal) else refusal_of(error)


def _check_ended(exchange: Exchange) -> None:
    """An iteration without Final is right only when this side has left it."""
    if exchange.aborted is not None:
        raise exchange.aborted
    if not exchange.left:
        raise InternalError("the answer ended without its last message")
