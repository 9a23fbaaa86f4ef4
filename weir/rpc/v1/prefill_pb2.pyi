from weir.rpc.v1 import common_pb2 as _common_pb2
from weir.rpc.v1 import kv_pb2 as _kv_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SessionHello(_message.Message):
    __slots__ = ("router_id", "router_incarnation", "worker_id", "worker_incarnation")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    ROUTER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    router_incarnation: int
    worker_id: str
    worker_incarnation: int
    def __init__(self, router_id: _Optional[str] = ..., router_incarnation: _Optional[int] = ..., worker_id: _Optional[str] = ..., worker_incarnation: _Optional[int] = ...) -> None: ...

class SessionWelcome(_message.Message):
    __slots__ = ("worker_id", "incarnation", "role", "role_epoch", "descriptor", "model", "context_tokens")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ROLE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    role: _common_pb2.Role
    role_epoch: int
    descriptor: _kv_pb2.PeerDescriptor
    model: str
    context_tokens: int
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., role: _Optional[_Union[_common_pb2.Role, str]] = ..., role_epoch: _Optional[int] = ..., descriptor: _Optional[_Union[_kv_pb2.PeerDescriptor, _Mapping]] = ..., model: _Optional[str] = ..., context_tokens: _Optional[int] = ...) -> None: ...

class PrefillServiceSessionRequest(_message.Message):
    __slots__ = ("hello", "begin", "cancel", "release")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    hello: SessionHello
    begin: _containers.RepeatedCompositeFieldContainer[BeginPrefill]
    cancel: _containers.RepeatedCompositeFieldContainer[CancelAttempt]
    release: _containers.RepeatedCompositeFieldContainer[ReleaseLease]
    def __init__(self, hello: _Optional[_Union[SessionHello, _Mapping]] = ..., begin: _Optional[_Iterable[_Union[BeginPrefill, _Mapping]]] = ..., cancel: _Optional[_Iterable[_Union[CancelAttempt, _Mapping]]] = ..., release: _Optional[_Iterable[_Union[ReleaseLease, _Mapping]]] = ...) -> None: ...

class BeginPrefill(_message.Message):
    __slots__ = ("request_id", "attempt", "prompt_token_ids", "generated_token_ids", "sampling", "tenant_salt", "timeout_ms", "lease_ms", "traceparent", "priority")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TENANT_SALT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    generated_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.SamplingParams
    tenant_salt: bytes
    timeout_ms: float
    lease_ms: float
    traceparent: str
    priority: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., generated_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., tenant_salt: _Optional[bytes] = ..., timeout_ms: _Optional[float] = ..., lease_ms: _Optional[float] = ..., traceparent: _Optional[str] = ..., priority: _Optional[int] = ...) -> None: ...

class CancelAttempt(_message.Message):
    __slots__ = ("request_id", "attempt", "reason")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    reason: str
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class ReleaseLease(_message.Message):
    __slots__ = ("request_id", "attempt", "lease_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    lease_id: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., lease_id: _Optional[int] = ...) -> None: ...

class PrefillServiceSessionResponse(_message.Message):
    __slots__ = ("welcome", "started", "kv_ready", "first_tokens", "ended", "load")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    KV_READY_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    welcome: SessionWelcome
    started: _containers.RepeatedCompositeFieldContainer[PrefillStarted]
    kv_ready: _containers.RepeatedCompositeFieldContainer[KvReady]
    first_tokens: _containers.RepeatedCompositeFieldContainer[FirstToken]
    ended: _containers.RepeatedCompositeFieldContainer[AttemptEnded]
    load: _common_pb2.WorkerLoad
    def __init__(self, welcome: _Optional[_Union[SessionWelcome, _Mapping]] = ..., started: _Optional[_Iterable[_Union[PrefillStarted, _Mapping]]] = ..., kv_ready: _Optional[_Iterable[_Union[KvReady, _Mapping]]] = ..., first_tokens: _Optional[_Iterable[_Union[FirstToken, _Mapping]]] = ..., ended: _Optional[_Iterable[_Union[AttemptEnded, _Mapping]]] = ..., load: _Optional[_Union[_common_pb2.WorkerLoad, _Mapping]] = ...) -> None: ...

class PrefillStarted(_message.Message):
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

class KvReady(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: _kv_pb2.KvTicket
    def __init__(self, ticket: _Optional[_Union[_kv_pb2.KvTicket, _Mapping]] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("request_id", "attempt", "token_id", "index", "logprobs", "finish_reason", "prefill_ms", "computed_tokens", "cached_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    token_id: int
    index: int
    logprobs: _common_pb2.PositionLogprobs
    finish_reason: _common_pb2.FinishReason
    prefill_ms: float
    computed_tokens: int
    cached_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., token_id: _Optional[int] = ..., index: _Optional[int] = ..., logprobs: _Optional[_Union[_common_pb2.PositionLogprobs, _Mapping]] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., prefill_ms: _Optional[float] = ..., computed_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class AttemptEnded(_message.Message):
    __slots__ = ("request_id", "attempt", "code", "message", "retry_after_ms")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    code: str
    message: str
    retry_after_ms: float
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., code: _Optional[str] = ..., message: _Optional[str] = ..., retry_after_ms: _Optional[float] = ...) -> None: ...
