from weir.rpc.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class ChatPrompt(_message.Message):
    __slots__ = ("messages", "add_generation_prompt")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    ADD_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    add_generation_prompt: bool
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., add_generation_prompt: bool = ...) -> None: ...

class TokenPrompt(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("model", "text", "tokens", "chat", "sampling", "client_request_id", "tenant", "slo_ttft_ms", "slo_tpot_ms", "priority")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CLIENT_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SLO_TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    SLO_TPOT_MS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    tokens: TokenPrompt
    chat: ChatPrompt
    sampling: _common_pb2.SamplingParams
    client_request_id: str
    tenant: str
    slo_ttft_ms: float
    slo_tpot_ms: float
    priority: int
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., tokens: _Optional[_Union[TokenPrompt, _Mapping]] = ..., chat: _Optional[_Union[ChatPrompt, _Mapping]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., client_request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., slo_ttft_ms: _Optional[float] = ..., slo_tpot_ms: _Optional[float] = ..., priority: _Optional[int] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("accepted", "delta", "final")
    class Accepted(_message.Message):
        __slots__ = ("request_id", "prompt_tokens", "model")
        REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
        PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
        MODEL_FIELD_NUMBER: _ClassVar[int]
        request_id: str
        prompt_tokens: int
        model: str
        def __init__(self, request_id: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., model: _Optional[str] = ...) -> None: ...
    class Delta(_message.Message):
        __slots__ = ("text", "token_ids", "first_index", "logprobs")
        TEXT_FIELD_NUMBER: _ClassVar[int]
        TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
        FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
        LOGPROBS_FIELD_NUMBER: _ClassVar[int]
        text: str
        token_ids: _containers.RepeatedScalarFieldContainer[int]
        first_index: int
        logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.PositionLogprobs]
        def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., first_index: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.PositionLogprobs, _Mapping]]] = ...) -> None: ...
    class Final(_message.Message):
        __slots__ = ("finish_reason", "stop_string", "usage", "timings")
        FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
        STOP_STRING_FIELD_NUMBER: _ClassVar[int]
        USAGE_FIELD_NUMBER: _ClassVar[int]
        TIMINGS_FIELD_NUMBER: _ClassVar[int]
        finish_reason: _common_pb2.FinishReason
        stop_string: str
        usage: _common_pb2.Usage
        timings: _common_pb2.Timings
        def __init__(self, finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., stop_string: _Optional[str] = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ..., timings: _Optional[_Union[_common_pb2.Timings, _Mapping]] = ...) -> None: ...
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    accepted: GenerateResponse.Accepted
    delta: GenerateResponse.Delta
    final: GenerateResponse.Final
    def __init__(self, accepted: _Optional[_Union[GenerateResponse.Accepted, _Mapping]] = ..., delta: _Optional[_Union[GenerateResponse.Delta, _Mapping]] = ..., final: _Optional[_Union[GenerateResponse.Final, _Mapping]] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class CancelResponse(_message.Message):
    __slots__ = ("was_running",)
    WAS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    was_running: bool
    def __init__(self, was_running: bool = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    class Model(_message.Message):
        __slots__ = ("name", "context_tokens", "architecture", "created_unix_s")
        NAME_FIELD_NUMBER: _ClassVar[int]
        CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
        ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
        CREATED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
        name: str
        context_tokens: int
        architecture: str
        created_unix_s: int
        def __init__(self, name: _Optional[str] = ..., context_tokens: _Optional[int] = ..., architecture: _Optional[str] = ..., created_unix_s: _Optional[int] = ...) -> None: ...
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ListModelsResponse.Model]
    def __init__(self, models: _Optional[_Iterable[_Union[ListModelsResponse.Model, _Mapping]]] = ...) -> None: ...

class ListWorkersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListWorkersResponse(_message.Message):
    __slots__ = ("workers", "stale")
    class Worker(_message.Message):
        __slots__ = ("worker_id", "incarnation", "role", "role_epoch", "address", "connected", "draining", "load", "model")
        WORKER_ID_FIELD_NUMBER: _ClassVar[int]
        INCARNATION_FIELD_NUMBER: _ClassVar[int]
        ROLE_FIELD_NUMBER: _ClassVar[int]
        ROLE_EPOCH_FIELD_NUMBER: _ClassVar[int]
        ADDRESS_FIELD_NUMBER: _ClassVar[int]
        CONNECTED_FIELD_NUMBER: _ClassVar[int]
        DRAINING_FIELD_NUMBER: _ClassVar[int]
        LOAD_FIELD_NUMBER: _ClassVar[int]
        MODEL_FIELD_NUMBER: _ClassVar[int]
        worker_id: str
        incarnation: int
        role: _common_pb2.Role
        role_epoch: int
        address: str
        connected: bool
        draining: bool
        load: _common_pb2.WorkerLoad
        model: str
        def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., role: _Optional[_Union[_common_pb2.Role, str]] = ..., role_epoch: _Optional[int] = ..., address: _Optional[str] = ..., connected: bool = ..., draining: bool = ..., load: _Optional[_Union[_common_pb2.WorkerLoad, _Mapping]] = ..., model: _Optional[str] = ...) -> None: ...
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[ListWorkersResponse.Worker]
    stale: bool
    def __init__(self, workers: _Optional[_Iterable[_Union[ListWorkersResponse.Worker, _Mapping]]] = ..., stale: bool = ...) -> None: ...

class GetRouterStateRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetRouterStateResponse(_message.Message):
    __slots__ = ("active_requests", "queued_requests", "open_sessions", "tasks", "ended", "requests")
    class EndedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class ActiveRequest(_message.Message):
        __slots__ = ("request_id", "state", "attempt", "prefill_worker", "decode_worker", "tokens_sent", "age_ms")
        REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
        STATE_FIELD_NUMBER: _ClassVar[int]
        ATTEMPT_FIELD_NUMBER: _ClassVar[int]
        PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
        DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
        TOKENS_SENT_FIELD_NUMBER: _ClassVar[int]
        AGE_MS_FIELD_NUMBER: _ClassVar[int]
        request_id: str
        state: _common_pb2.RequestState
        attempt: int
        prefill_worker: str
        decode_worker: str
        tokens_sent: int
        age_ms: float
        def __init__(self, request_id: _Optional[str] = ..., state: _Optional[_Union[_common_pb2.RequestState, str]] = ..., attempt: _Optional[int] = ..., prefill_worker: _Optional[str] = ..., decode_worker: _Optional[str] = ..., tokens_sent: _Optional[int] = ..., age_ms: _Optional[float] = ...) -> None: ...
    ACTIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    OPEN_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    active_requests: int
    queued_requests: int
    open_sessions: int
    tasks: int
    ended: _containers.ScalarMap[str, int]
    requests: _containers.RepeatedCompositeFieldContainer[GetRouterStateResponse.ActiveRequest]
    def __init__(self, active_requests: _Optional[int] = ..., queued_requests: _Optional[int] = ..., open_sessions: _Optional[int] = ..., tasks: _Optional[int] = ..., ended: _Optional[_Mapping[str, int]] = ..., requests: _Optional[_Iterable[_Union[GetRouterStateResponse.ActiveRequest, _Mapping]]] = ...) -> None: ...

class GetTraceRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class GetTraceResponse(_message.Message):
    __slots__ = ("request_id", "trace_id", "sampled", "model", "state", "error", "received_unix_s", "timings", "usage", "spans")
    class Span(_message.Message):
        __slots__ = ("name", "parent", "start_ms", "length_ms", "attributes", "error", "events")
        class AttributesEntry(_message.Message):
            __slots__ = ("key", "value")
            KEY_FIELD_NUMBER: _ClassVar[int]
            VALUE_FIELD_NUMBER: _ClassVar[int]
            key: str
            value: str
            def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
        NAME_FIELD_NUMBER: _ClassVar[int]
        PARENT_FIELD_NUMBER: _ClassVar[int]
        START_MS_FIELD_NUMBER: _ClassVar[int]
        LENGTH_MS_FIELD_NUMBER: _ClassVar[int]
        ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
        ERROR_FIELD_NUMBER: _ClassVar[int]
        EVENTS_FIELD_NUMBER: _ClassVar[int]
        name: str
        parent: int
        start_ms: float
        length_ms: float
        attributes: _containers.ScalarMap[str, str]
        error: str
        events: _containers.RepeatedCompositeFieldContainer[GetTraceResponse.Event]
        def __init__(self, name: _Optional[str] = ..., parent: _Optional[int] = ..., start_ms: _Optional[float] = ..., length_ms: _Optional[float] = ..., attributes: _Optional[_Mapping[str, str]] = ..., error: _Optional[str] = ..., events: _Optional[_Iterable[_Union[GetTraceResponse.Event, _Mapping]]] = ...) -> None: ...
    class Event(_message.Message):
        __slots__ = ("name", "at_ms", "attributes")
        class AttributesEntry(_message.Message):
            __slots__ = ("key", "value")
            KEY_FIELD_NUMBER: _ClassVar[int]
            VALUE_FIELD_NUMBER: _ClassVar[int]
            key: str
            value: str
            def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
        NAME_FIELD_NUMBER: _ClassVar[int]
        AT_MS_FIELD_NUMBER: _ClassVar[int]
        ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
        name: str
        at_ms: float
        attributes: _containers.ScalarMap[str, str]
        def __init__(self, name: _Optional[str] = ..., at_ms: _Optional[float] = ..., attributes: _Optional[_Mapping[str, str]] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    trace_id: str
    sampled: bool
    model: str
    state: _common_pb2.RequestState
    error: str
    received_unix_s: float
    timings: _common_pb2.Timings
    usage: _common_pb2.Usage
    spans: _containers.RepeatedCompositeFieldContainer[GetTraceResponse.Span]
    def __init__(self, request_id: _Optional[str] = ..., trace_id: _Optional[str] = ..., sampled: bool = ..., model: _Optional[str] = ..., state: _Optional[_Union[_common_pb2.RequestState, str]] = ..., error: _Optional[str] = ..., received_unix_s: _Optional[float] = ..., timings: _Optional[_Union[_common_pb2.Timings, _Mapping]] = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ..., spans: _Optional[_Iterable[_Union[GetTraceResponse.Span, _Mapping]]] = ...) -> None: ...
