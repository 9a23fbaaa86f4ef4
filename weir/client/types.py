"""What a client sends and receives: plain typed values, no protobuf."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

from weir.lifecycle import FinishReason


class Message(TypedDict):
    """One chat message: role is system, user, assistant or tool."""

    role: str
    content: str


class Options(TypedDict, total=False):
    """Optional settings of a generation; absent ones take the server's defaults (see router.proto)."""

    model: str
    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop: bool
    ignore_eos: bool
    logprobs: int
    client_request_id: str
    tenant: str
    slo_ttft_ms: float
    slo_tpot_ms: float
    priority: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Accepted:
    """First message: the request was admitted."""

    request_id: str
    prompt_tokens: int
    model: str


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and the natural logarithm of its probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The chosen token at one position, and the most likely ones, best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens; ``text`` is empty while a character or a possible stop string is incomplete."""

    text: str
    token_ids: tuple[int, ...]
    first_index: int
    logprobs: tuple[PositionLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts; local_compute + local_cache_hit + external_kv = prompt_tokens."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    local_compute_tokens: int
    local_cache_hit_tokens: int
    external_kv_tokens: int


@dataclass(frozen=True, slots=True)
class KvReadTimings:
    """How the KV reached the decode worker; see common.proto for each field."""

    bytes: int
    descriptors: int
    reads: int
    transport: str
    busy_ms: float
    exposed_ms: float
    guard_ms: float
    checksum_ms: float
    void_reads: int

    @property
    def gigabytes_per_s(self) -> float:
        """Bytes over the time with a read under way, in 10^9 bytes a second."""
        return self.bytes / self.busy_ms / 1e6 if self.busy_ms > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Timings:
    """Stages in milliseconds; admit + queue + prefill + first_token = ttft."""

    admit_ms: float
    queue_ms: float
    prefill_ms: float
    first_token_ms: float
    ttft_ms: float
    second_token_ms: float
    decode_ms: float
    e2e_ms: float
    tpot_ms: float
    kv_read: KvReadTimings | None
    prefill_worker: str
    decode_worker: str
    attempts: int


@dataclass(frozen=True, slots=True)
class Final:
    """Last message: why it ended, what it cost."""

    finish_reason: FinishReason
    stop_string: str
    usage: Usage
    timings: Timings


Event = Accepted | Delta | Final


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole generation."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    final: Final


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model that the router serves."""

    name: str
    context_tokens: int
    architecture: str
    created_unix_s: int
