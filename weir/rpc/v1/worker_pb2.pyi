from weir.rpc.v1 import common_pb2 as _common_pb2
from weir.rpc.v1 import kv_pb2 as _kv_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListBlocksRequest(_message.Message):
    __slots__ = ("limit",)
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    limit: int
    def __init__(self, limit: _Optional[int] = ...) -> None: ...

class ListBlocksResponse(_message.Message):
    __slots__ = ("hashes",)
    HASHES_FIELD_NUMBER: _ClassVar[int]
    hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class GetStateRequest(_message.Message):
    __slots__ = ("check_integrity",)
    CHECK_INTEGRITY_FIELD_NUMBER: _ClassVar[int]
    check_integrity: bool
    def __init__(self, check_integrity: bool = ...) -> None: ...

class GetStateResponse(_message.Message):
    __slots__ = ("worker_id", "incarnation", "role", "role_epoch", "draining", "load", "open_sessions", "tasks", "open_files", "rss_bytes", "leases_ended", "void_reads", "transports", "model", "fingerprint", "pid", "prefills_completed", "prompt_tokens_by_source")
    class LeasesEndedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class VoidReadsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class TransportsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class PromptTokensBySourceEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ROLE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    OPEN_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    OPEN_FILES_FIELD_NUMBER: _ClassVar[int]
    RSS_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASES_ENDED_FIELD_NUMBER: _ClassVar[int]
    VOID_READS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    PREFILLS_COMPLETED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_BY_SOURCE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    role: _common_pb2.Role
    role_epoch: int
    draining: bool
    load: _common_pb2.WorkerLoad
    open_sessions: int
    tasks: int
    open_files: int
    rss_bytes: int
    leases_ended: _containers.ScalarMap[str, int]
    void_reads: _containers.ScalarMap[str, int]
    transports: _containers.ScalarMap[str, str]
    model: str
    fingerprint: _kv_pb2.KvFingerprint
    pid: int
    prefills_completed: int
    prompt_tokens_by_source: _containers.ScalarMap[str, int]
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., role: _Optional[_Union[_common_pb2.Role, str]] = ..., role_epoch: _Optional[int] = ..., draining: bool = ..., load: _Optional[_Union[_common_pb2.WorkerLoad, _Mapping]] = ..., open_sessions: _Optional[int] = ..., tasks: _Optional[int] = ..., open_files: _Optional[int] = ..., rss_bytes: _Optional[int] = ..., leases_ended: _Optional[_Mapping[str, int]] = ..., void_reads: _Optional[_Mapping[str, int]] = ..., transports: _Optional[_Mapping[str, str]] = ..., model: _Optional[str] = ..., fingerprint: _Optional[_Union[_kv_pb2.KvFingerprint, _Mapping]] = ..., pid: _Optional[int] = ..., prefills_completed: _Optional[int] = ..., prompt_tokens_by_source: _Optional[_Mapping[str, int]] = ...) -> None: ...

class SetRoleRequest(_message.Message):
    __slots__ = ("role", "expected_epoch", "drain_timeout_ms")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_EPOCH_FIELD_NUMBER: _ClassVar[int]
    DRAIN_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    role: _common_pb2.Role
    expected_epoch: int
    drain_timeout_ms: float
    def __init__(self, role: _Optional[_Union[_common_pb2.Role, str]] = ..., expected_epoch: _Optional[int] = ..., drain_timeout_ms: _Optional[float] = ...) -> None: ...

class SetRoleResponse(_message.Message):
    __slots__ = ("role", "role_epoch", "took_ms")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ROLE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TOOK_MS_FIELD_NUMBER: _ClassVar[int]
    role: _common_pb2.Role
    role_epoch: int
    took_ms: float
    def __init__(self, role: _Optional[_Union[_common_pb2.Role, str]] = ..., role_epoch: _Optional[int] = ..., took_ms: _Optional[float] = ...) -> None: ...

class GetDescriptorRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetDescriptorResponse(_message.Message):
    __slots__ = ("descriptor",)
    DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    descriptor: _kv_pb2.PeerDescriptor
    def __init__(self, descriptor: _Optional[_Union[_kv_pb2.PeerDescriptor, _Mapping]] = ...) -> None: ...
