from weir.rpc.v1 import common_pb2 as _common_pb2
from weir.rpc.v1 import kv_pb2 as _kv_pb2
from weir.rpc.v1 import prefill_pb2 as _prefill_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KvSource(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KV_SOURCE_UNSPECIFIED: _ClassVar[KvSource]
    KV_SOURCE_REMOTE: _ClassVar[KvSource]
    KV_SOURCE_LOCAL: _ClassVar[KvSource]
KV_SOURCE_UNSPECIFIED: KvSource
KV_SOURCE_REMOTE: KvSource
KV_SOURCE_LOCAL: KvSource

class DecodeServiceSessionRequest(_message.Message):
    __slots__ = ("hello", "begin", "kv_ready", "first_tokens", "cancel")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    KV_READY_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    hello: _prefill_pb2.SessionHello
    begin: _containers.RepeatedCompositeFieldContainer[BeginDecode]
    kv_ready: _containers.RepeatedCompositeFieldContainer[_prefill_pb2.KvReady]
    first_tokens: _containers.RepeatedCompositeFieldContainer[_prefill_pb2.FirstToken]
    cancel: _containers.RepeatedCompositeFieldContainer[_prefill_pb2.CancelAttempt]
    def __init__(self, hello: _Optional[_Union[_prefill_pb2.SessionHello, _Mapping]] = ..., begin: _Optional[_Iterable[_Union[BeginDecode, _Mapping]]] = ..., kv_ready: _Optional[_Iterable[_Union[_prefill_pb2.KvReady, _Mapping]]] = ..., first_tokens: _Optional[_Iterable[_Union[_prefill_pb2.FirstToken, _Mapping]]] = ..., cancel: _Optional[_Iterable[_Union[_prefill_pb2.CancelAttempt, _Mapping]]] = ...) -> None: ...

class BeginDecode(_message.Message):
    __slots__ = ("request_id", "attempt", "kv_source", "prompt_token_ids", "generated_token_ids", "sampling", "tenant_salt", "timeout_ms", "source", "traceparent", "priority")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    KV_SOURCE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TENANT_SALT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    kv_source: KvSource
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    generated_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.SamplingParams
    tenant_salt: bytes
    timeout_ms: float
    source: _kv_pb2.PeerDescriptor
    traceparent: str
    priority: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., kv_source: _Optional[_Union[KvSource, str]] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., generated_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., tenant_salt: _Optional[bytes] = ..., timeout_ms: _Optional[float] = ..., source: _Optional[_Union[_kv_pb2.PeerDescriptor, _Mapping]] = ..., traceparent: _Optional[str] = ..., priority: _Optional[int] = ...) -> None: ...

class DecodeServiceSessionResponse(_message.Message):
    __slots__ = ("welcome", "started", "kv_reads", "tokens", "ended", "load")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    KV_READS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    welcome: _prefill_pb2.SessionWelcome
    started: _containers.RepeatedCompositeFieldContainer[DecodeStarted]
    kv_reads: _containers.RepeatedCompositeFieldContainer[KvReadDone]
    tokens: _containers.RepeatedCompositeFieldContainer[TokenBatch]
    ended: _containers.RepeatedCompositeFieldContainer[_prefill_pb2.AttemptEnded]
    load: _common_pb2.WorkerLoad
    def __init__(self, welcome: _Optional[_Union[_prefill_pb2.SessionWelcome, _Mapping]] = ..., started: _Optional[_Iterable[_Union[DecodeStarted, _Mapping]]] = ..., kv_reads: _Optional[_Iterable[_Union[KvReadDone, _Mapping]]] = ..., tokens: _Optional[_Iterable[_Union[TokenBatch, _Mapping]]] = ..., ended: _Optional[_Iterable[_Union[_prefill_pb2.AttemptEnded, _Mapping]]] = ..., load: _Optional[_Union[_common_pb2.WorkerLoad, _Mapping]] = ...) -> None: ...

class DecodeStarted(_message.Message):
    __slots__ = ("request_id", "attempt", "cached_tokens", "queue_ms")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    cached_tokens: int
    queue_ms: float
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., queue_ms: _Optional[float] = ...) -> None: ...

class KvReadDone(_message.Message):
    __slots__ = ("request_id", "attempt", "lease_id", "void_reason", "detail", "timings")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    VOID_REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    lease_id: int
    void_reason: str
    detail: str
    timings: _common_pb2.KvReadTimings
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., lease_id: _Optional[int] = ..., void_reason: _Optional[str] = ..., detail: _Optional[str] = ..., timings: _Optional[_Union[_common_pb2.KvReadTimings, _Mapping]] = ...) -> None: ...

class TokenBatch(_message.Message):
    __slots__ = ("request_id", "attempt", "first_index", "token_ids", "logprobs", "finish_reason", "usage", "prefill_ms")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    first_index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.PositionLogprobs]
    finish_reason: _common_pb2.FinishReason
    usage: _common_pb2.Usage
    prefill_ms: float
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., first_index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.PositionLogprobs, _Mapping]]] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ..., prefill_ms: _Optional[float] = ...) -> None: ...
