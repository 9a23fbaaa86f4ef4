"""PrefillService: the wire on one side, the prefill leg on the other. Converts and delegates."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from weir.clock import Clock
from weir.engine.output import TokenLogprobs
from weir.engine.request import EngineRequest, Mode
from weir.errors import FailedPrecondition, InvalidArgument, WeirError
from weir.ids import RequestKey, WorkerKey
from weir.rpc import convert
from weir.rpc.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc
from weir.services.prefill.desk import AttemptOver, AttemptStarted, FirstTokenMade, News, TicketIssued
from weir.services.prefill.leg import PrefillLeg, PrefillSession

MAX_ID_CHARS = 128


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """``check_open`` raises when this worker takes no new prompts now (role, drain, dead engine)."""

    def __init__(
        self,
        leg: PrefillLeg,
        worker: WorkerKey,
        clock: Clock,
        *,
        eos_token_ids: frozenset[int],
        context_tokens: int,
        welcome: Callable[[], prefill_pb2.SessionWelcome],
        load: Callable[[], common_pb2.WorkerLoad],
        check_open: Callable[[], None],
    ) -> None:
        self._leg = leg
        self._worker = worker
        self._clock = clock
        self._eos = eos_token_ids
        self._context_tokens = context_tokens
        self._welcome = welcome
        self._load = load
        self._check_open = check_open

    async def Session(
        self, requests: AsyncIterator[prefill_pb2.PrefillServiceSessionRequest], context: Any
    ) -> AsyncIterator[prefill_pb2.PrefillServiceSessionResponse]:
        """One router's stream; see the proto."""
        first = await _first_message(requests)
        check_hello(first.hello if first.HasField("hello") else None, self._worker)
        session = self._leg.open(first.hello.router_id)
        # The generator may stay suspended when the router is gone; the callback comes in any case.
        context.add_done_callback(lambda _: self._leg.lose(session))
        reader = asyncio.create_task(self._read(first, requests, session), name=f"session-{session.name}")
        try:
            yield prefill_pb2.PrefillServiceSessionResponse(welcome=self._welcome())
            while True:
                await session.wake.wait()
                session.wake.clear()
                if news := self._leg.take_news(session):
                    yield self._to_wire(news)
                elif session.ended:
                    break
            if reader.done():
                await reader  # raises what was wrong with the router's messages
            if session.error is not None:
                raise session.error
        finally:
            reader.cancel()
            self._leg.lose(session)

    async def _read(
        self,
        first: prefill_pb2.PrefillServiceSessionRequest,
        requests: AsyncIterator[prefill_pb2.PrefillServiceSessionRequest],
        session: PrefillSession,
    ) -> None:
        try:
            self._handle(session, first)
            async for message in requests:
                self._handle(session, message)
        finally:
            session.end()

    def _handle(self, session: PrefillSession, message: prefill_pb2.PrefillServiceSessionRequest) -> None:
        for cancel in message.cancel:
            self._leg.cancel(cancel.request_id, cancel.attempt, cancel.reason)
        for release in message.release:
            self._leg.release(RequestKey(release.request_id, release.attempt), release.lease_id)
        for begin in message.begin:
            self._begin(session, begin)
        self._leg.pump()

    def _begin(self, session: PrefillSession, begin: prefill_pb2.BeginPrefill) -> None:
        key = RequestKey(begin.request_id, begin.attempt)
        try:
            self._check_open()
            request = self._request(key, begin)
        except WeirError as error:
            self._leg.refuse(session, key, error)
            return
        self._leg.begin(session, request, begin.lease_ms / 1e3, begin.traceparent)

    def _request(self, key: RequestKey, begin: prefill_pb2.BeginPrefill) -> EngineRequest:
        if not 0 < len(key.request_id) <= MAX_ID_CHARS:
            raise InvalidArgument("request_id", key.request_id, f"1 to {MAX_ID_CHARS} characters")
        prompt = tuple(begin.prompt_token_ids)
        deadline_s = None
        if begin.timeout_ms > 0:
            deadline_s = self._clock.monotonic_s() + begin.timeout_ms / 1e3
        return EngineRequest(
            key=key,
            prompt=prompt,
            generated=tuple(begin.generated_token_ids),
            sampling=convert.sampling_from_pb(
                begin.sampling, default_max_tokens=max(1, self._context_tokens - len(prompt))
            ),
            mode=Mode.PREFILL,
            eos_token_ids=self._eos,
            tenant_salt=begin.tenant_salt,
            deadline_monotonic_s=deadline_s,
            priority=begin.priority,
        )

    def _to_wire(self, news: list[News]) -> prefill_pb2.PrefillServiceSessionResponse:
        message = prefill_pb2.PrefillServiceSessionResponse(load=self._load())
        for item in news:
            if isinstance(item, AttemptStarted):
                message.started.add(
                    request_id=item.key.request_id,
                    attempt=item.key.attempt,
                    cached_tokens=item.cached_tokens,
                    queue_ms=item.queued_s * 1e3,
                )
            elif isinstance(item, TicketIssued):
                message.kv_ready.add(ticket=convert.ticket_to_pb(item.ticket))
            elif isinstance(item, FirstTokenMade):
                message.first_tokens.append(_first_token(item))
            else:
                message.ended.append(_ended(item))
        return message


def check_hello(hello: prefill_pb2.SessionHello | None, worker: WorkerKey) -> None:
    """Raise unless the hello is there and means this worker process."""
    if hello is None or not hello.router_id:
        raise InvalidArgument("hello.router_id", "", "the first message must say who the router is")
    if hello.worker_id not in ("", worker.worker_id) or hello.worker_incarnation not in (0, worker.incarnation):
        meant = WorkerKey(hello.worker_id, hello.worker_incarnation)
        raise FailedPrecondition(f"the session is meant for worker {meant}; this is {worker}")


async def _first_message(
    requests: AsyncIterator[prefill_pb2.PrefillServiceSessionRequest],
) -> prefill_pb2.PrefillServiceSessionRequest:
    async for message in requests:
        return message
    raise InvalidArgument("hello", "", "the session ended before its first message")


def _first_token(made: FirstTokenMade) -> prefill_pb2.FirstToken:
    return prefill_pb2.FirstToken(
        request_id=made.key.request_id,
        attempt=made.key.attempt,
        token_id=made.token,
        index=made.index,
        logprobs=None if made.logprobs is None else _logprobs(made.logprobs),
        finish_reason=convert.finish_to_pb(made.finish),
        prefill_ms=made.prefill_s * 1e3,
        computed_tokens=made.usage.local_compute,
        cached_tokens=made.usage.local_cache_hit,
    )


def _logprobs(logprobs: TokenLogprobs) -> common_pb2.PositionLogprobs:
    return common_pb2.PositionLogprobs(
        chosen=common_pb2.TokenLogprob(token_id=logprobs.token, logprob=logprobs.logprob),
        top=[common_pb2.TokenLogprob(token_id=token, logprob=value) for token, value in logprobs.top],
    )


def _ended(over: AttemptOver) -> prefill_pb2.AttemptEnded:
    return prefill_pb2.AttemptEnded(
        request_id=over.key.request_id,
        attempt=over.key.attempt,
        code=over.code,
        message=over.message,
        retry_after_ms=(over.retry_after_s or 0.0) * 1e3,
    )
