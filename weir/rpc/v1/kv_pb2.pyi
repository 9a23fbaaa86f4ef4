from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KvFingerprint(_message.Message):
    __slots__ = ("weights", "architecture", "dtype", "kv_dtype", "layers", "kv_heads", "head_dim", "block_size", "layout_version", "tokenizer", "adapter", "rope", "tp_degree")
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ROPE_FIELD_NUMBER: _ClassVar[int]
    TP_DEGREE_FIELD_NUMBER: _ClassVar[int]
    weights: str
    architecture: str
    dtype: str
    kv_dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    layout_version: int
    tokenizer: str
    adapter: str
    rope: str
    tp_degree: int
    def __init__(self, weights: _Optional[str] = ..., architecture: _Optional[str] = ..., dtype: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., layers: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., block_size: _Optional[int] = ..., layout_version: _Optional[int] = ..., tokenizer: _Optional[str] = ..., adapter: _Optional[str] = ..., rope: _Optional[str] = ..., tp_degree: _Optional[int] = ...) -> None: ...

class PeerDescriptor(_message.Message):
    __slots__ = ("worker_id", "incarnation", "fingerprint", "agent_metadata", "memory", "device_id", "pool_base", "block_bytes", "num_blocks", "guard_base", "host_id")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    AGENT_METADATA_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    POOL_BASE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    GUARD_BASE_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    fingerprint: KvFingerprint
    agent_metadata: bytes
    memory: str
    device_id: int
    pool_base: int
    block_bytes: int
    num_blocks: int
    guard_base: int
    host_id: str
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., fingerprint: _Optional[_Union[KvFingerprint, _Mapping]] = ..., agent_metadata: _Optional[bytes] = ..., memory: _Optional[str] = ..., device_id: _Optional[int] = ..., pool_base: _Optional[int] = ..., block_bytes: _Optional[int] = ..., num_blocks: _Optional[int] = ..., guard_base: _Optional[int] = ..., host_id: _Optional[str] = ...) -> None: ...

class KvTicket(_message.Message):
    __slots__ = ("request_id", "attempt", "lease_id", "source_worker_id", "source_incarnation", "fingerprint_digest", "first_block", "blocks", "generations", "num_tokens", "final", "deadline_unix_s", "seal")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    lease_id: int
    source_worker_id: str
    source_incarnation: int
    fingerprint_digest: bytes
    first_block: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: int
    final: bool
    deadline_unix_s: float
    seal: bytes
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., lease_id: _Optional[int] = ..., source_worker_id: _Optional[str] = ..., source_incarnation: _Optional[int] = ..., fingerprint_digest: _Optional[bytes] = ..., first_block: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[int] = ..., final: bool = ..., deadline_unix_s: _Optional[float] = ..., seal: _Optional[bytes] = ...) -> None: ...
