"""DecodeService: the wire on one side, the decode leg on the other. Converts and delegates."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from weir.clock import Clock
from weir.engine.output import TokenLogprobs, Usage
from weir.engine.request import EngineRequest, Mode
from weir.errors import FailedPrecondition, InvalidArgument, KvReadVoid, WeirError
from weir.ids import RequestKey, WorkerKey
from weir.rpc import convert
from weir.rpc.v1 import common_pb2, decode_pb2, decode_pb2_grpc, kv_pb2, prefill_pb2
from weir.services.decode.desk import AttemptOver, AttemptStarted, KvRead, News, NewTokens
from weir.services.decode.leg import DecodeLeg, DecodeSession
from weir.services.decode.reads import ReadTimings

MAX_ID_CHARS = 128

_MODES: dict[int, Mode] = {
    decode_pb2.KV_SOURCE_REMOTE: Mode.REMOTE,
    decode_pb2.KV_SOURCE_LOCAL: Mode.LOCAL,
}


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    """``check_open`` raises when this worker takes no new sequences now (role, drain, dead engine)."""

    def __init__(
        self,
        leg: DecodeLeg,
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
        self, requests: AsyncIterator[decode_pb2.DecodeServiceSessionRequest], context: Any
    ) -> AsyncIterator[decode_pb2.DecodeServiceSessionResponse]:
        """One router's stream; see the proto."""
        first = await _first_message(requests)
        _check_hello(first.hello if first.HasField("hello") else None, self._worker)
        session = self._leg.open(first.hello.router_id)
        # The generator may stay suspended when the router is gone; the callback comes in any case.
        context.add_done_callback(lambda _: self._leg.lose(session))
        reader = asyncio.create_task(self._read(first, requests, session), name=f"session-{session.name}")
        try:
            yield decode_pb2.DecodeServiceSessionResponse(welcome=self._welcome())
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
        first: decode_pb2.DecodeServiceSessionRequest,
        requests: AsyncIterator[decode_pb2.DecodeServiceSessionRequest],
        session: DecodeSession,
    ) -> None:
        try:
            self._handle(session, first)
            async for message in requests:
                self._handle(session, message)
        finally:
            session.end()

    def _handle(self, session: DecodeSession, message: decode_pb2.DecodeServiceSessionRequest) -> None:
        for cancel in message.cancel:
            self._leg.cancel(cancel.request_id, cancel.attempt, cancel.reason)
        for begin in message.begin:
            self._begin(session, begin)
        for ready in message.kv_ready:
            self._offer(ready.ticket)
        for token in message.first_tokens:
            self._leg.first_token(RequestKey(token.request_id, token.attempt), token.index, token.token_id)
        self._leg.pump()

    def _offer(self, pb: kv_pb2.KvTicket) -> None:
        try:
            ticket = convert.ticket_from_pb(pb)
        except KvReadVoid as void:
            self._leg.malformed_ticket(RequestKey(pb.request_id, pb.attempt), void)
            return
        self._leg.offer(ticket)

    def _begin(self, session: DecodeSession, begin: decode_pb2.BeginDecode) -> None:
        key = RequestKey(begin.request_id, begin.attempt)
        try:
            self._check_open()
            request = self._request(key, begin)
            remote = request.mode is Mode.REMOTE
            source = convert.descriptor_from_pb(begin.source) if remote else None
        except WeirError as error:
            self._leg.refuse(session, key, error)
            return
        self._leg.begin(session, request, source, begin.traceparent)

    def _request(self, key: RequestKey, begin: decode_pb2.BeginDecode) -> EngineRequest:
        if not 0 < len(key.request_id) <= MAX_ID_CHARS:
            raise InvalidArgument("request_id", key.request_id, f"1 to {MAX_ID_CHARS} characters")
        mode = _MODES.get(begin.kv_source)
        if mode is None:
            raise InvalidArgument("kv_source", begin.kv_source, "must be remote or local")
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
            mode=mode,
            eos_token_ids=self._eos,
            tenant_salt=begin.tenant_salt,
            deadline_monotonic_s=deadline_s,
            priority=begin.priority,
        )

    def _to_wire(self, news: list[News]) -> decode_pb2.DecodeServiceSessionResponse:
        message = decode_pb2.DecodeServiceSessionResponse(load=self._load())
        for item in news:
            if isinstance(item, NewTokens):
                message.tokens.append(_tokens(item))
            elif isinstance(item, AttemptStarted):
                message.started.add(
                    request_id=item.key.request_id,
                    attempt=item.key.attempt,
                    cached_tokens=item.cached_tokens,
                    queue_ms=item.queued_s * 1e3,
                )
            elif isinstance(item, KvRead):
                message.kv_reads.append(_kv_read(item))
            else:
                message.ended.append(_ended(item))
        return message


def _check_hello(hello: prefill_pb2.SessionHello | None, worker: WorkerKey) -> None:
    if hello is None or not hello.router_id:
        raise InvalidArgument("hello.router_id", "", "the first message must say who the router is")
    if hello.worker_id not in ("", worker.worker_id) or hello.worker_incarnation not in (0, worker.incarnation):
        meant = WorkerKey(hello.worker_id, hello.worker_incarnation)
        raise FailedPrecondition(f"the session is meant for worker {meant}; this is {worker}")


async def _first_message(
    requests: AsyncIterator[decode_pb2.DecodeServiceSessionRequest],
) -> decode_pb2.DecodeServiceSessionRequest:
    async for message in requests:
        return message
    raise InvalidArgument("hello", "", "the session ended before its first message")


def _tokens(new: NewTokens) -> decode_pb2.TokenBatch:
    return decode_pb2.TokenBatch(
        request_id=new.key.request_id,
        attempt=new.key.attempt,
        first_index=new.first_index,
        token_ids=new.tokens,
        logprobs=[_logprobs(one) for one in new.logprobs or ()],
        finish_reason=convert.finish_to_pb(new.finish),
        usage=None if new.usage is None else _usage(new.usage),
        prefill_ms=new.prefill_s * 1e3,
    )


def _logprobs(logprobs: TokenLogprobs) -> common_pb2.PositionLogprobs:
    return common_pb2.PositionLogprobs(
        chosen=common_pb2.TokenLogprob(token_id=logprobs.token, logprob=logprobs.logprob),
        top=[common_pb2.TokenLogprob(token_id=token, logprob=value) for token, value in logprobs.top],
    )


def _usage(usage: Usage) -> common_pb2.Usage:
    return common_pb2.Usage(
        prompt_tokens=usage.prompt,
        completion_tokens=usage.completion,
        cached_tokens=usage.local_cache_hit,
        local_compute_tokens=usage.local_compute,
        local_cache_hit_tokens=usage.local_cache_hit,
        external_kv_tokens=usage.external_kv,
    )


def _kv_read(read: KvRead) -> decode_pb2.KvReadDone:
    return decode_pb2.KvReadDone(
        request_id=read.key.request_id,
        attempt=read.key.attempt,
        lease_id=read.lease_id,
        void_reason=read.reason,
        detail=read.detail,
        timings=_timings(read.timings),
    )


def _timings(timings: ReadTimings) -> common_pb2.KvReadTimings:
    return common_pb2.KvReadTimings(
        bytes=timings.bytes,
        descriptors=timings.descriptors,
        reads=timings.reads,
        transport=timings.transport,
        busy_ms=timings.busy_s * 1e3,
        exposed_ms=timings.exposed_s * 1e3,
        guard_ms=timings.guard_s * 1e3,
        checksum_ms=timings.checksum_s * 1e3,
        void_reads=timings.void_reads,
    )


def _ended(over: AttemptOver) -> prefill_pb2.AttemptEnded:
    return prefill_pb2.AttemptEnded(
        request_id=over.key.request_id,
        attempt=over.key.attempt,
        code=over.code,
        message=over.message,
        retry_after_ms=(over.retry_after_s or 0.0) * 1e3,
    )
