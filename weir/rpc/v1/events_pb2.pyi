from weir.rpc.v1 import common_pb2 as _common_pb2
from weir.rpc.v1 import kv_pb2 as _kv_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BalanceAction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BALANCE_ACTION_UNSPECIFIED: _ClassVar[BalanceAction]
    BALANCE_ACTION_NONE: _ClassVar[BalanceAction]
    BALANCE_ACTION_LOCAL_PREFILL: _ClassVar[BalanceAction]
    BALANCE_ACTION_FLIP: _ClassVar[BalanceAction]
    BALANCE_ACTION_ALL_MIXED: _ClassVar[BalanceAction]
    BALANCE_ACTION_SCALE_UP: _ClassVar[BalanceAction]
    BALANCE_ACTION_SCALE_DOWN: _ClassVar[BalanceAction]
    BALANCE_ACTION_BACK_PRESSURE: _ClassVar[BalanceAction]
BALANCE_ACTION_UNSPECIFIED: BalanceAction
BALANCE_ACTION_NONE: BalanceAction
BALANCE_ACTION_LOCAL_PREFILL: BalanceAction
BALANCE_ACTION_FLIP: BalanceAction
BALANCE_ACTION_ALL_MIXED: BalanceAction
BALANCE_ACTION_SCALE_UP: BalanceAction
BALANCE_ACTION_SCALE_DOWN: BalanceAction
BALANCE_ACTION_BACK_PRESSURE: BalanceAction

class EventOrigin(_message.Message):
    __slots__ = ("publisher_id", "incarnation", "sequence", "unix_s")
    PUBLISHER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    UNIX_S_FIELD_NUMBER: _ClassVar[int]
    publisher_id: str
    incarnation: int
    sequence: int
    unix_s: float
    def __init__(self, publisher_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., sequence: _Optional[int] = ..., unix_s: _Optional[float] = ...) -> None: ...

class LifecycleEvent(_message.Message):
    __slots__ = ("origin", "request_id", "attempt", "state", "worker_id", "prompt_tokens", "completion_tokens", "cached_tokens", "age_ms", "error", "ttft_ms", "tpot_ms", "model", "tenant")
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    TPOT_MS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    origin: EventOrigin
    request_id: str
    attempt: int
    state: _common_pb2.RequestState
    worker_id: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    age_ms: float
    error: str
    ttft_ms: float
    tpot_ms: float
    model: str
    tenant: str
    def __init__(self, origin: _Optional[_Union[EventOrigin, _Mapping]] = ..., request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., state: _Optional[_Union[_common_pb2.RequestState, str]] = ..., worker_id: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., age_ms: _Optional[float] = ..., error: _Optional[str] = ..., ttft_ms: _Optional[float] = ..., tpot_ms: _Optional[float] = ..., model: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class CancelEvent(_message.Message):
    __slots__ = ("origin", "request_id", "attempt", "reason")
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    origin: EventOrigin
    request_id: str
    attempt: int
    reason: str
    def __init__(self, origin: _Optional[_Union[EventOrigin, _Mapping]] = ..., request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class TransferCompletedEvent(_message.Message):
    __slots__ = ("origin", "request_id", "attempt", "lease_id", "source_worker_id", "source_incarnation")
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    origin: EventOrigin
    request_id: str
    attempt: int
    lease_id: int
    source_worker_id: str
    source_incarnation: int
    def __init__(self, origin: _Optional[_Union[EventOrigin, _Mapping]] = ..., request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., lease_id: _Optional[int] = ..., source_worker_id: _Optional[str] = ..., source_incarnation: _Optional[int] = ...) -> None: ...

class LoadEvent(_message.Message):
    __slots__ = ("origin", "role", "draining", "load")
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    origin: EventOrigin
    role: _common_pb2.Role
    draining: bool
    load: _common_pb2.WorkerLoad
    def __init__(self, origin: _Optional[_Union[EventOrigin, _Mapping]] = ..., role: _Optional[_Union[_common_pb2.Role, str]] = ..., draining: bool = ..., load: _Optional[_Union[_common_pb2.WorkerLoad, _Mapping]] = ...) -> None: ...

class KvBlocksEvent(_message.Message):
    __slots__ = ("origin", "stored", "removed")
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    origin: EventOrigin
    stored: _containers.RepeatedScalarFieldContainer[bytes]
    removed: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, origin: _Optional[_Union[EventOrigin, _Mapping]] = ..., stored: _Optional[_Iterable[bytes]] = ..., removed: _Optional[_Iterable[bytes]] = ...) -> None: ...

class WorkerProfile(_message.Message):
    __slots__ = ("prefill_s", "step_s", "read_s", "rough", "device", "threads")
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    READ_S_FIELD_NUMBER: _ClassVar[int]
    ROUGH_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    prefill_s: _containers.RepeatedScalarFieldContainer[float]
    step_s: _containers.RepeatedScalarFieldContainer[float]
    read_s: _containers.RepeatedScalarFieldContainer[float]
    rough: bool
    device: str
    threads: int
    def __init__(self, prefill_s: _Optional[_Iterable[float]] = ..., step_s: _Optional[_Iterable[float]] = ..., read_s: _Optional[_Iterable[float]] = ..., rough: bool = ..., device: _Optional[str] = ..., threads: _Optional[int] = ...) -> None: ...

class WorkerRecord(_message.Message):
    __slots__ = ("worker_id", "incarnation", "role", "role_epoch", "address", "draining", "model", "fingerprint", "num_blocks", "block_size", "context_tokens", "model_path", "started_unix_s", "max_running", "profile", "heartbeat_s")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ROLE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MODEL_PATH_FIELD_NUMBER: _ClassVar[int]
    STARTED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    role: _common_pb2.Role
    role_epoch: int
    address: str
    draining: bool
    model: str
    fingerprint: _kv_pb2.KvFingerprint
    num_blocks: int
    block_size: int
    context_tokens: int
    model_path: str
    started_unix_s: float
    max_running: int
    profile: WorkerProfile
    heartbeat_s: float
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., role: _Optional[_Union[_common_pb2.Role, str]] = ..., role_epoch: _Optional[int] = ..., address: _Optional[str] = ..., draining: bool = ..., model: _Optional[str] = ..., fingerprint: _Optional[_Union[_kv_pb2.KvFingerprint, _Mapping]] = ..., num_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., context_tokens: _Optional[int] = ..., model_path: _Optional[str] = ..., started_unix_s: _Optional[float] = ..., max_running: _Optional[int] = ..., profile: _Optional[_Union[WorkerProfile, _Mapping]] = ..., heartbeat_s: _Optional[float] = ...) -> None: ...

class RoleFlip(_message.Message):
    __slots__ = ("worker_id", "role", "expected_epoch")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_EPOCH_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: _common_pb2.Role
    expected_epoch: int
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[_Union[_common_pb2.Role, str]] = ..., expected_epoch: _Optional[int] = ...) -> None: ...

class DecisionEvent(_message.Message):
    __slots__ = ("origin", "number", "action", "reason", "flips", "role", "worker_id", "expires_unix_s", "cancels", "inputs", "dry_run", "local_share", "admit_per_s", "epochs")
    class InputsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FLIPS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    CANCELS_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    LOCAL_SHARE_FIELD_NUMBER: _ClassVar[int]
    ADMIT_PER_S_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    origin: EventOrigin
    number: int
    action: BalanceAction
    reason: str
    flips: _containers.RepeatedCompositeFieldContainer[RoleFlip]
    role: _common_pb2.Role
    worker_id: str
    expires_unix_s: float
    cancels: int
    inputs: _containers.ScalarMap[str, float]
    dry_run: bool
    local_share: float
    admit_per_s: float
    epochs: int
    def __init__(self, origin: _Optional[_Union[EventOrigin, _Mapping]] = ..., number: _Optional[int] = ..., action: _Optional[_Union[BalanceAction, str]] = ..., reason: _Optional[str] = ..., flips: _Optional[_Iterable[_Union[RoleFlip, _Mapping]]] = ..., role: _Optional[_Union[_common_pb2.Role, str]] = ..., worker_id: _Optional[str] = ..., expires_unix_s: _Optional[float] = ..., cancels: _Optional[int] = ..., inputs: _Optional[_Mapping[str, float]] = ..., dry_run: bool = ..., local_share: _Optional[float] = ..., admit_per_s: _Optional[float] = ..., epochs: _Optional[int] = ...) -> None: ...

class ScaleEvent(_message.Message):
    __slots__ = ("origin", "number", "start_role", "stop_worker_id", "deadline_unix_s")
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    START_ROLE_FIELD_NUMBER: _ClassVar[int]
    STOP_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    origin: EventOrigin
    number: int
    start_role: _common_pb2.Role
    stop_worker_id: str
    deadline_unix_s: float
    def __init__(self, origin: _Optional[_Union[EventOrigin, _Mapping]] = ..., number: _Optional[int] = ..., start_role: _Optional[_Union[_common_pb2.Role, str]] = ..., stop_worker_id: _Optional[str] = ..., deadline_unix_s: _Optional[float] = ...) -> None: ...
