"""DecodeService: the wire on one side, the decode leg on the other. Converts and delegates."""

from weir.attempts.desk import AttemptStarted
from weir.attempts.leg import RouterSession
from weir.attempts.wire import SessionServicer, add_started, logprobs_to_pb, over_to_pb
from weir.engine.output import Usage
from weir.engine.request import Mode
from weir.errors import InvalidArgument, KvReadVoid, WeirError
from weir.ids import RequestKey
from weir.rpc import convert
from weir.rpc.v1 import common_pb2, decode_pb2, decode_pb2_grpc, kv_pb2
from weir.services.decode.desk import KvRead, News, NewTokens
from weir.services.decode.leg import DecodeLeg
from weir.services.decode.reads import ReadTimings

_MODES: dict[int, Mode] = {
    decode_pb2.KV_SOURCE_REMOTE: Mode.REMOTE,
    decode_pb2.KV_SOURCE_LOCAL: Mode.LOCAL,
}


class DecodeServicer(
    SessionServicer[DecodeLeg, decode_pb2.DecodeServiceSessionRequest, decode_pb2.DecodeServiceSessionResponse],
    decode_pb2_grpc.DecodeServiceServicer,
):
    """Sessions of the decode leg."""

    def _welcome(self) -> decode_pb2.DecodeServiceSessionResponse:
        return decode_pb2.DecodeServiceSessionResponse(welcome=self._facts.welcome())

    def _handle(self, session: RouterSession, message: decode_pb2.DecodeServiceSessionRequest) -> None:
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

    def _begin(self, session: RouterSession, begin: decode_pb2.BeginDecode) -> None:
        key = RequestKey(begin.request_id, begin.attempt)
        try:
            self._facts.check_open()
            request = self._request(key, begin, _mode(begin))
            remote = request.mode is Mode.REMOTE
            source = convert.descriptor_from_pb(begin.source) if remote else None
        except WeirError as error:
            self._leg.refuse(session, key, error)
            return
        self._leg.begin(session, request, source, begin.traceparent)

    def _to_wire(self, news: list[News]) -> decode_pb2.DecodeServiceSessionResponse:
        message = decode_pb2.DecodeServiceSessionResponse(load=self._facts.load())
        for item in news:
            if isinstance(item, NewTokens):
                message.tokens.append(_tokens(item))
            elif isinstance(item, AttemptStarted):
                add_started(message, item)
            elif isinstance(item, KvRead):
                message.kv_reads.append(_kv_read(item))
            else:
                message.ended.append(over_to_pb(item))
        return message


def _mode(begin: decode_pb2.BeginDecode) -> Mode:
    mode = _MODES.get(begin.kv_source)
    if mode is None:
        raise InvalidArgument("kv_source", begin.kv_source, "must be remote or local")
    return mode


def _tokens(new: NewTokens) -> decode_pb2.TokenBatch:
    return decode_pb2.TokenBatch(
        request_id=new.key.request_id,
        attempt=new.key.attempt,
        first_index=new.first_index,
        token_ids=new.tokens,
        logprobs=[logprobs_to_pb(one) for one in new.logprobs or ()],
        finish_reason=convert.finish_to_pb(new.finish),
        usage=None if new.usage is None else _usage(new.usage),
        prefill_ms=new.prefill_s * 1e3,
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
