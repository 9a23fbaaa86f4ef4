from weir.rpc.v1 import common_pb2 as _common_pb2
from weir.rpc.v1 import events_pb2 as _events_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListMembersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListMembersResponse(_message.Message):
    __slots__ = ("members", "stale", "role_changes")
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    ROLE_CHANGES_FIELD_NUMBER: _ClassVar[int]
    members: _containers.RepeatedCompositeFieldContainer[_events_pb2.WorkerRecord]
    stale: bool
    role_changes: int
    def __init__(self, members: _Optional[_Iterable[_Union[_events_pb2.WorkerRecord, _Mapping]]] = ..., stale: bool = ..., role_changes: _Optional[int] = ...) -> None: ...

class SetWorkerRoleRequest(_message.Message):
    __slots__ = ("worker_id", "role", "expected_epoch", "drain_timeout_ms")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_EPOCH_FIELD_NUMBER: _ClassVar[int]
    DRAIN_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: _common_pb2.Role
    expected_epoch: int
    drain_timeout_ms: float
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[_Union[_common_pb2.Role, str]] = ..., expected_epoch: _Optional[int] = ..., drain_timeout_ms: _Optional[float] = ...) -> None: ...

class SetWorkerRoleResponse(_message.Message):
    __slots__ = ("role", "role_epoch", "took_ms")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ROLE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TOOK_MS_FIELD_NUMBER: _ClassVar[int]
    role: _common_pb2.Role
    role_epoch: int
    took_ms: float
    def __init__(self, role: _Optional[_Union[_common_pb2.Role, str]] = ..., role_epoch: _Optional[int] = ..., took_ms: _Optional[float] = ...) -> None: ...

class ListDecisionsRequest(_message.Message):
    __slots__ = ("limit",)
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    limit: int
    def __init__(self, limit: _Optional[int] = ...) -> None: ...

class ListDecisionsResponse(_message.Message):
    __slots__ = ("decisions", "latest", "mode", "pending")
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    LATEST_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    decisions: _containers.RepeatedCompositeFieldContainer[_events_pb2.DecisionEvent]
    latest: _events_pb2.DecisionEvent
    mode: str
    pending: int
    def __init__(self, decisions: _Optional[_Iterable[_Union[_events_pb2.DecisionEvent, _Mapping]]] = ..., latest: _Optional[_Union[_events_pb2.DecisionEvent, _Mapping]] = ..., mode: _Optional[str] = ..., pending: _Optional[int] = ...) -> None: ...

class CancelDecisionRequest(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class CancelDecisionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
