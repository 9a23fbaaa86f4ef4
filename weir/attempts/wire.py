"""A router's stream on the wire: one session with all its attempts. Converts and delegates."""

from __future__ import annotations

import abc
import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from weir.attempts.desk import AttemptOver, AttemptStarted
from weir.attempts.leg import Leg, RouterSession
from weir.clock import Clock
from weir.engine.output import TokenLogprobs
from weir.engine.request import EngineRequest, Mode
from weir.errors import FailedPrecondition, InvalidArgument
from weir.ids import RequestKey, WorkerKey
from weir.rpc import convert
from weir.rpc.v1 import common_pb2, decode_pb2, prefill_pb2

MAX_ID_CHARS = 128

L = TypeVar("L", bound=Leg[Any, Any])
Request = TypeVar("Request", prefill_pb2.PrefillServiceSessionRequest, decode_pb2.DecodeServiceSessionRequest)
Response = TypeVar("Response", prefill_pb2.PrefillServiceSessionResponse, decode_pb2.DecodeServiceSessionResponse)


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What a session tells and asks about its worker. ``check_open`` raises when nothing new is taken now."""

    worker: WorkerKey
    clock: Clock
    eos_token_ids: frozenset[int]
    context_tokens: int
    welcome: Callable[[], prefill_pb2.SessionWelcome]
    load: Callable[[], common_pb2.WorkerLoad]
    check_open: Callable[[], None]


class SessionServicer(abc.ABC, Generic[L, Request, Response]):
    """The stream of one router, for one leg."""

    def __init__(self, leg: L, facts: WorkerFacts) -> None:
        self._leg = leg
        self._facts = facts

    @abc.abstractmethod
    def _welcome(self) -> Response:
        """The first answer."""

    @abc.abstractmethod
    def _handle(self, session: RouterSession, message: Request) -> None:
        """Act on one message of the router."""

    @abc.abstractmethod
    def _to_wire(self, news: list[Any]) -> Response:
        """All news of a step as one message."""

    async def Session(self, requests: AsyncIterator[Request], context: Any) -> AsyncIterator[Response]:
        """One router's stream; see the proto."""
        first = await _first_message(requests)
        check_hello(first.hello if first.HasField("hello") else None, self._facts.worker)
        session = self._leg.open(first.hello.router_id)
        # The generator may stay suspended when the router is gone; the callback comes in any case.
        context.add_done_callback(lambda _: self._leg.lose(session))
        reader = asyncio.create_task(self._read(first, requests, session), name=f"session-{session.name}")
        try:
            yield self._welcome()
            while True:
                if news := self._leg.take_news(session):
                    yield self._to_wire(news)
                elif session.ended:
                    break
                else:
                    await session.wake.wait()
                    session.wake.clear()
            if reader.done():
                await reader  # raises what was wrong with the router's messages
            if session.error is not None:
                raise session.error
        finally:
            reader.cancel()
            self._leg.lose(session)

    async def _read(self, first: Request, requests: AsyncIterator[Request], session: RouterSession) -> None:
        try:
            self._handle(session, first)
            async for message in requests:
                self._handle(session, message)
        finally:
            session.end()

    def _request(
        self, key: RequestKey, begin: prefill_pb2.BeginPrefill | decode_pb2.BeginDecode, mode: Mode
    ) -> EngineRequest:
        """What the engine is asked for. Raises InvalidArgument."""
        if not 0 < len(key.request_id) <= MAX_ID_CHARS:
            raise InvalidArgument("request_id", key.request_id, f"1 to {MAX_ID_CHARS} characters")
        prompt = tuple(begin.prompt_token_ids)
        deadline_s = None
        if begin.timeout_ms > 0:
            deadline_s = self._facts.clock.monotonic_s() + begin.timeout_ms / 1e3
        return EngineRequest(
            key=key,
            prompt=prompt,
            generated=tuple(begin.generated_token_ids),
            sampling=convert.sampling_from_pb(
                begin.sampling, default_max_tokens=max(1, self._facts.context_tokens - len(prompt))
            ),
            mode=mode,
            eos_token_ids=self._facts.eos_token_ids,
            tenant_salt=begin.tenant_salt,
            deadline_monotonic_s=deadline_s,
            priority=begin.priority,
        )


def check_hello(hello: prefill_pb2.SessionHello | None, worker: WorkerKey) -> None:
    """Raise unless the hello is there and means this worker process."""
    if hello is None or not hello.router_id:
        raise InvalidArgument("hello.router_id", "", "the first message must say who the router is")
    if hello.worker_id not in ("", worker.worker_id) or hello.worker_incarnation not in (0, worker.incarnation):
        meant = WorkerKey(hello.worker_id, hello.worker_incarnation)
        raise FailedPrecondition(f"the session is meant for worker {meant}; this is {worker}")


async def _first_message(requests: AsyncIterator[Request]) -> Request:
    async for message in requests:
        return message
    raise InvalidArgument("hello", "", "the session ended before its first message")


def add_started(message: prefill_pb2.PrefillServiceSessionResponse | decode_pb2.DecodeServiceSessionResponse,
                item: AttemptStarted) -> None:  # fmt: skip
    """Add it to ``message``."""
    message.started.add(
        request_id=item.key.request_id,
        attempt=item.key.attempt,
        cached_tokens=item.cached_tokens,
        queue_ms=item.queued_s * 1e3,
    )


def logprobs_to_pb(logprobs: TokenLogprobs) -> common_pb2.PositionLogprobs:
    """Of one position."""
    return common_pb2.PositionLogprobs(
        chosen=common_pb2.TokenLogprob(token_id=logprobs.token, logprob=logprobs.logprob),
        top=[common_pb2.TokenLogprob(token_id=token, logprob=value) for token, value in logprobs.top],
    )


def over_to_pb(over: AttemptOver) -> prefill_pb2.AttemptEnded:
    """The end of an attempt."""
    return prefill_pb2.AttemptEnded(
        request_id=over.key.request_id,
        attempt=over.key.attempt,
        code=over.code,
        message=over.message,
        retry_after_ms=(over.retry_after_s or 0.0) * 1e3,
    )
