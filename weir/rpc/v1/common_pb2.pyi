from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
    ROLE_MIXED: _ClassVar[Role]

class RequestState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REQUEST_STATE_UNSPECIFIED: _ClassVar[RequestState]
    REQUEST_STATE_RECEIVED: _ClassVar[RequestState]
    REQUEST_STATE_ADMITTED: _ClassVar[RequestState]
    REQUEST_STATE_PREFILLING: _ClassVar[RequestState]
    REQUEST_STATE_PREFILLED: _ClassVar[RequestState]
    REQUEST_STATE_TRANSFERRING: _ClassVar[RequestState]
    REQUEST_STATE_DECODING: _ClassVar[RequestState]
    REQUEST_STATE_FINISHED: _ClassVar[RequestState]
    REQUEST_STATE_CANCELLED: _ClassVar[RequestState]
    REQUEST_STATE_REJECTED: _ClassVar[RequestState]
    REQUEST_STATE_FAILED: _ClassVar[RequestState]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
ROLE_MIXED: Role
REQUEST_STATE_UNSPECIFIED: RequestState
REQUEST_STATE_RECEIVED: RequestState
REQUEST_STATE_ADMITTED: RequestState
REQUEST_STATE_PREFILLING: RequestState
REQUEST_STATE_PREFILLED: RequestState
REQUEST_STATE_TRANSFERRING: RequestState
REQUEST_STATE_DECODING: RequestState
REQUEST_STATE_FINISHED: RequestState
REQUEST_STATE_CANCELLED: RequestState
REQUEST_STATE_REJECTED: RequestState
REQUEST_STATE_FAILED: RequestState
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_CANCELLED: FinishReason
FINISH_REASON_ERROR: FinishReason

class SamplingParams(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "seed", "stop", "stop_token_ids", "include_stop", "ignore_eos", "logprobs")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    seed: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    include_stop: bool
    ignore_eos: bool
    logprobs: int
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., seed: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., include_stop: bool = ..., ignore_eos: bool = ..., logprobs: _Optional[int] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class PositionLogprobs(_message.Message):
    __slots__ = ("chosen", "top")
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    chosen: TokenLogprob
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, chosen: _Optional[_Union[TokenLogprob, _Mapping]] = ..., top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "cached_tokens", "local_compute_tokens", "local_cache_hit_tokens", "external_kv_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_COMPUTE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_CACHE_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXTERNAL_KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    local_compute_tokens: int
    local_cache_hit_tokens: int
    external_kv_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., local_compute_tokens: _Optional[int] = ..., local_cache_hit_tokens: _Optional[int] = ..., external_kv_tokens: _Optional[int] = ...) -> None: ...

class KvReadTimings(_message.Message):
    __slots__ = ("bytes", "descriptors", "reads", "transport", "busy_ms", "exposed_ms", "guard_ms", "checksum_ms", "void_reads")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTORS_FIELD_NUMBER: _ClassVar[int]
    READS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    BUSY_MS_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_MS_FIELD_NUMBER: _ClassVar[int]
    GUARD_MS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_MS_FIELD_NUMBER: _ClassVar[int]
    VOID_READS_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    descriptors: int
    reads: int
    transport: str
    busy_ms: float
    exposed_ms: float
    guard_ms: float
    checksum_ms: float
    void_reads: int
    def __init__(self, bytes: _Optional[int] = ..., descriptors: _Optional[int] = ..., reads: _Optional[int] = ..., transport: _Optional[str] = ..., busy_ms: _Optional[float] = ..., exposed_ms: _Optional[float] = ..., guard_ms: _Optional[float] = ..., checksum_ms: _Optional[float] = ..., void_reads: _Optional[int] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("admit_ms", "queue_ms", "prefill_ms", "first_token_ms", "ttft_ms", "second_token_ms", "decode_ms", "e2e_ms", "tpot_ms", "kv_read", "prefill_worker", "decode_worker", "attempts")
    ADMIT_MS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_MS_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    SECOND_TOKEN_MS_FIELD_NUMBER: _ClassVar[int]
    DECODE_MS_FIELD_NUMBER: _ClassVar[int]
    E2E_MS_FIELD_NUMBER: _ClassVar[int]
    TPOT_MS_FIELD_NUMBER: _ClassVar[int]
    KV_READ_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    admit_ms: float
    queue_ms: float
    prefill_ms: float
    first_token_ms: float
    ttft_ms: float
    second_token_ms: float
    decode_ms: float
    e2e_ms: float
    tpot_ms: float
    kv_read: KvReadTimings
    prefill_worker: str
    decode_worker: str
    attempts: int
    def __init__(self, admit_ms: _Optional[float] = ..., queue_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., first_token_ms: _Optional[float] = ..., ttft_ms: _Optional[float] = ..., second_token_ms: _Optional[float] = ..., decode_ms: _Optional[float] = ..., e2e_ms: _Optional[float] = ..., tpot_ms: _Optional[float] = ..., kv_read: _Optional[_Union[KvReadTimings, _Mapping]] = ..., prefill_worker: _Optional[str] = ..., decode_worker: _Optional[str] = ..., attempts: _Optional[int] = ...) -> None: ...

class BlockCounts(_message.Message):
    __slots__ = ("free", "used", "cached", "leased", "quarantined", "total")
    FREE_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    free: int
    used: int
    cached: int
    leased: int
    quarantined: int
    total: int
    def __init__(self, free: _Optional[int] = ..., used: _Optional[int] = ..., cached: _Optional[int] = ..., leased: _Optional[int] = ..., quarantined: _Optional[int] = ..., total: _Optional[int] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("sequence", "running", "waiting", "pending_prefill_tokens", "blocks", "open_leases", "outstanding_reads", "decode_step_ms", "prefill_tokens_per_s", "generated_tokens", "prefilled_tokens", "routers", "kv_read_bytes")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    PENDING_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OPEN_LEASES_FIELD_NUMBER: _ClassVar[int]
    OUTSTANDING_READS_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEP_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROUTERS_FIELD_NUMBER: _ClassVar[int]
    KV_READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    running: int
    waiting: int
    pending_prefill_tokens: int
    blocks: BlockCounts
    open_leases: int
    outstanding_reads: int
    decode_step_ms: float
    prefill_tokens_per_s: float
    generated_tokens: int
    prefilled_tokens: int
    routers: int
    kv_read_bytes: int
    def __init__(self, sequence: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., pending_prefill_tokens: _Optional[int] = ..., blocks: _Optional[_Union[BlockCounts, _Mapping]] = ..., open_leases: _Optional[int] = ..., outstanding_reads: _Optional[int] = ..., decode_step_ms: _Optional[float] = ..., prefill_tokens_per_s: _Optional[float] = ..., generated_tokens: _Optional[int] = ..., prefilled_tokens: _Optional[int] = ..., routers: _Optional[int] = ..., kv_read_bytes: _Optional[int] = ...) -> None: ...
