"""Between the client's values and the wire; shared by the async and the blocking client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weir.client.types import (
    Accepted,
    Completion,
    Delta,
    Event,
    Final,
    KvReadTimings,
    Message,
    ModelInfo,
    Options,
    PositionLogprobs,
    Timings,
    TokenLogprob,
    Usage,
)
from weir.errors import InternalError, InvalidArgument
from weir.lifecycle import FinishReason
from weir.rpc.v1 import common_pb2, router_pb2

_SAMPLING = frozenset(
    {
        "max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "presence_penalty",
        "frequency_penalty", "repetition_penalty", "seed", "include_stop", "ignore_eos", "logprobs",
    }
)  # fmt: skip
_REQUEST = frozenset({"model", "client_request_id", "tenant", "slo_ttft_ms", "slo_tpot_ms", "priority"})
_FINISH = {
    common_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    common_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    common_pb2.FINISH_REASON_CANCELLED: FinishReason.CANCELLED,
    common_pb2.FINISH_REASON_ERROR: FinishReason.ERROR,
}


def generate_request(prompt: str | Sequence[int], options: Options) -> router_pb2.GenerateRequest:
    """The wire form of a completion; ``prompt`` is text or token ids."""
    request = _request(options)
    try:
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.tokens.SetInParent()
            request.tokens.token_ids.extend(prompt)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument("prompt", prompt, str(error)) from error
    return request


def chat_request(messages: Sequence[Message], options: Options) -> router_pb2.GenerateRequest:
    """The wire form of a chat."""
    request = _request(options)
    request.chat.SetInParent()
    for index, message in enumerate(messages):
        try:
            request.chat.messages.add(role=message["role"], content=message["content"])
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidArgument(f"messages[{index}]", message, f"role and content are needed: {error}") from error
    return request


def _request(options: Options) -> router_pb2.GenerateRequest:
    request = router_pb2.GenerateRequest()
    request.sampling.SetInParent()
    for name, value in options.items():
        if value is None or name == "timeout_s":
            continue
        try:
            _set_option(request, name, value)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidArgument(name, value, str(error)) from error
    return request


def _set_option(request: router_pb2.GenerateRequest, name: str, value: Any) -> None:
    if name in _SAMPLING:
        setattr(request.sampling, name, value)
    elif name in _REQUEST:
        setattr(request, name, value)
    elif name in {"stop", "stop_token_ids"}:
        getattr(request.sampling, name).extend([value] if isinstance(value, str) else value)
    elif name == "logit_bias":
        request.sampling.logit_bias.update(value)
    else:
        known = ", ".join(sorted(Options.__annotations__))
        raise InvalidArgument(name, value, f"unknown option; known: {known}")


def event_from_pb(response: router_pb2.GenerateResponse) -> Event:
    """The value of one stream message."""
    kind = response.WhichOneof("event")
    if kind == "delta":
        delta = response.delta
        return Delta(delta.text, tuple(delta.token_ids), delta.first_index, _logprobs(delta.logprobs))
    if kind == "accepted":
        accepted = response.accepted
        return Accepted(accepted.request_id, accepted.prompt_tokens, accepted.model)
    if kind == "final":
        return _final(response.final)
    raise InternalError("the router sent a message without an event")


def _logprobs(entries: Sequence[common_pb2.PositionLogprobs]) -> tuple[PositionLogprobs, ...]:
    return tuple(
        PositionLogprobs(
            TokenLogprob(entry.chosen.token_id, entry.chosen.logprob),
            tuple(TokenLogprob(top.token_id, top.logprob) for top in entry.top),
        )
        for entry in entries
    )


def _final(final: router_pb2.GenerateResponse.Final) -> Final:
    usage, times = final.usage, final.timings
    kv_read = None
    if times.HasField("kv_read"):
        kv = times.kv_read
        kv_read = KvReadTimings(
            kv.bytes, kv.descriptors, kv.reads, kv.transport, kv.busy_ms, kv.exposed_ms, kv.guard_ms,
            kv.checksum_ms, kv.void_reads,
        )  # fmt: skip
    return Final(
        _FINISH.get(final.finish_reason, FinishReason.ERROR),
        final.stop_string,
        Usage(
            usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, usage.local_compute_tokens,
            usage.local_cache_hit_tokens, usage.external_kv_tokens,
        ),
        Timings(
            times.admit_ms, times.queue_ms, times.prefill_ms, times.first_token_ms, times.ttft_ms,
            times.second_token_ms, times.decode_ms, times.e2e_ms, times.tpot_ms, kv_read,
            times.prefill_worker, times.decode_worker, times.attempts,
        ),
    )  # fmt: skip


def models_from_pb(response: router_pb2.ListModelsResponse) -> list[ModelInfo]:
    """The values of a model list."""
    return [ModelInfo(m.name, m.context_tokens, m.architecture, m.created_unix_s) for m in response.models]


class Collector:
    """Puts a stream together into one Completion."""

    def __init__(self) -> None:
        self._request_id = ""
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._final: Final | None = None

    def add(self, event: Event) -> None:
        """Take the next event of the stream."""
        if isinstance(event, Delta):
            assert event.first_index == len(self._tokens), "tokens arrive in order, none twice"
            self._text.append(event.text)
            self._tokens.extend(event.token_ids)
        elif isinstance(event, Accepted):
            self._request_id = event.request_id
        else:
            self._final = event

    def completion(self) -> Completion:
        """The whole; InternalError when the stream ended without its last message."""
        if self._final is None:
            raise InternalError("the stream ended without its last message")
        return Completion(self._request_id, "".join(self._text), tuple(self._tokens), self._final)
