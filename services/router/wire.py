"""Commands as protobuf, and protobuf news as facts of the book. Tickets and first tokens pass through untouched."""

from __future__ import annotations

from weir.engine.sampling import SamplingParams
from weir.ids import WorkerKey
from weir.lifecycle import FinishReason
from weir.rpc.convert import finish_from_pb, sampling_to_pb
from weir.rpc.v1 import common_pb2, decode_pb2, kv_pb2, prefill_pb2
from weir.services.router.book import RequestBook
from weir.services.router.commands import (
    SendBeginDecode,
    SendBeginPrefill,
    SendCancel,
    SendRelease,
)
from weir.services.router.facts import EndedNews, FirstTokenNews

NO_LOGPROBS: tuple[common_pb2.PositionLogprobs, ...] = ()
_FINISH = {value: finish_from_pb(value) for value in common_pb2.FinishReason.values()}


class BeginWriter:
    """Builds the two begin messages; the parameters of one request are converted once for both."""

    def __init__(self) -> None:
        self._params: SamplingParams | None = None
        self._message = common_pb2.SamplingParams()

    def prefill(self, command: SendBeginPrefill) -> prefill_pb2.BeginPrefill:
        """For the prefill worker."""
        admission = command.admission
        return prefill_pb2.BeginPrefill(
            request_id=admission.request_id,
            attempt=command.attempt,
            prompt_token_ids=admission.prompt,
            generated_token_ids=command.generated,
            sampling=self._sampling(admission.sampling),
            tenant_salt=admission.tenant_salt,
            timeout_ms=command.timeout_ms,
            lease_ms=command.lease_ms,
            traceparent=admission.traceparent,
            priority=admission.priority,
        )

    def decode(self, command: SendBeginDecode, source: kv_pb2.PeerDescriptor | None) -> decode_pb2.BeginDecode:
        """For the decode worker; ``source`` None prefills there."""
        admission = command.admission
        kind = decode_pb2.KV_SOURCE_LOCAL if source is None else decode_pb2.KV_SOURCE_REMOTE
        return decode_pb2.BeginDecode(
            request_id=admission.request_id,
            attempt=command.attempt,
            kv_source=kind,
            prompt_token_ids=admission.prompt,
            generated_token_ids=command.generated,
            sampling=self._sampling(admission.sampling),
            tenant_salt=admission.tenant_salt,
            timeout_ms=command.timeout_ms,
            source=source,
            traceparent=admission.traceparent,
            priority=admission.priority,
        )

    def _sampling(self, params: SamplingParams) -> common_pb2.SamplingParams:
        if params is not self._params:
            self._params, self._message = params, sampling_to_pb(params)
        return self._message


def cancel_message(command: SendCancel) -> prefill_pb2.CancelAttempt:
    """For either leg."""
    return prefill_pb2.CancelAttempt(request_id=command.request_id, attempt=command.attempt, reason=command.reason)


def release_message(command: SendRelease) -> prefill_pb2.ReleaseLease:
    """For the prefill worker."""
    return prefill_pb2.ReleaseLease(request_id=command.request_id, attempt=command.attempt, lease_id=command.lease_id)


def take_prefill_news(
    book: RequestBook, worker: WorkerKey, message: prefill_pb2.PrefillServiceSessionResponse, now_s: float
) -> None:
    """Tell ``book`` what one message of a prefill session says."""
    for started in message.started:
        book.prefill_started(
            worker, started.request_id, started.attempt, started.cached_tokens, started.queue_ms, now_s
        )
    for ready in message.kv_ready:
        ticket = ready.ticket
        book.kv_ready(worker, ticket.request_id, ticket.attempt, ticket.lease_id, ticket.final, ready)
    for first in message.first_tokens:
        news = FirstTokenNews(
            index=first.index,
            token=first.token_id,
            logprobs=(first.logprobs,) if first.HasField("logprobs") else NO_LOGPROBS,
            finish=_finish(first.finish_reason),
            cached_tokens=first.cached_tokens,
            prefill_ms=first.prefill_ms,
            message=first,
        )
        book.first_token(worker, first.request_id, first.attempt, news, now_s)
    for ended in message.ended:
        _take_ended(book, worker, True, ended, now_s)


def take_decode_news(
    book: RequestBook, worker: WorkerKey, message: decode_pb2.DecodeServiceSessionResponse, now_s: float
) -> None:
    """Tell ``book`` what one message of a decode session says."""
    for started in message.started:
        book.decode_started(worker, started.request_id, started.attempt, started.cached_tokens, started.queue_ms)
    for read in message.kv_reads:
        timings = read.timings if read.HasField("timings") else None
        book.kv_read_done(
            worker,
            read.request_id,
            read.attempt,
            read.lease_id,
            read.void_reason,
            read.detail,
            timings,
            now_s,
        )
    for batch in message.tokens:
        finish_reason = batch.finish_reason
        logprobs = batch.logprobs
        book.tokens(
            worker,
            batch.request_id,
            batch.attempt,
            batch.first_index,
            tuple(batch.token_ids),
            tuple(logprobs) if logprobs else NO_LOGPROBS,
            _finish(finish_reason) if finish_reason else None,
            batch.usage if finish_reason else None,
            batch.prefill_ms,
            now_s,
        )
    for ended in message.ended:
        _take_ended(book, worker, False, ended, now_s)


def _finish(value: int) -> FinishReason | None:
    """A reason that this version does not know still ends the request."""
    return _FINISH.get(value, FinishReason.STOP)


def _take_ended(
    book: RequestBook, worker: WorkerKey, prefill: bool, ended: prefill_pb2.AttemptEnded, now_s: float
) -> None:
    news = EndedNews(ended.code, ended.message, ended.retry_after_ms)
    book.attempt_ended(worker, prefill, ended.request_id, ended.attempt, news, now_s)
