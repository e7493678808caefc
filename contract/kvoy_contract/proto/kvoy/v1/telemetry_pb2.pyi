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
    ROLE_BOTH: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_DEVICE: _ClassVar[Tier]
    TIER_HOST: _ClassVar[Tier]
    TIER_DISK: _ClassVar[Tier]
ROLE_UNSPECIFIED: Role
ROLE_BOTH: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
TIER_DEVICE: Tier
TIER_HOST: Tier
TIER_DISK: Tier

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EngineDescription(_message.Message):
    __slots__ = ("epoch", "served_model", "aliases", "model_identity", "adapters", "role", "block_size", "hash_stride", "num_blocks", "block_bytes", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "tokenizer_digest", "numerics", "parallel", "transfer_addresses", "engine_kind", "engine_version", "capabilities", "device_memory_bytes", "vocab_size")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SERVED_MODEL_FIELD_NUMBER: _ClassVar[int]
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    MODEL_IDENTITY_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    HASH_STRIDE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    PARALLEL_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    ENGINE_KIND_FIELD_NUMBER: _ClassVar[int]
    ENGINE_VERSION_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    epoch: bytes
    served_model: str
    aliases: _containers.RepeatedScalarFieldContainer[str]
    model_identity: str
    adapters: _containers.RepeatedScalarFieldContainer[str]
    role: Role
    block_size: int
    hash_stride: int
    num_blocks: int
    block_bytes: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    tokenizer_digest: str
    numerics: str
    parallel: ParallelSizes
    transfer_addresses: _containers.RepeatedCompositeFieldContainer[TransferAddress]
    engine_kind: str
    engine_version: str
    capabilities: Capabilities
    device_memory_bytes: int
    vocab_size: int
    def __init__(self, epoch: _Optional[bytes] = ..., served_model: _Optional[str] = ..., aliases: _Optional[_Iterable[str]] = ..., model_identity: _Optional[str] = ..., adapters: _Optional[_Iterable[str]] = ..., role: _Optional[_Union[Role, str]] = ..., block_size: _Optional[int] = ..., hash_stride: _Optional[int] = ..., num_blocks: _Optional[int] = ..., block_bytes: _Optional[int] = ..., max_model_len: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., tokenizer_digest: _Optional[str] = ..., numerics: _Optional[str] = ..., parallel: _Optional[_Union[ParallelSizes, _Mapping]] = ..., transfer_addresses: _Optional[_Iterable[_Union[TransferAddress, _Mapping]]] = ..., engine_kind: _Optional[str] = ..., engine_version: _Optional[str] = ..., capabilities: _Optional[_Union[Capabilities, _Mapping]] = ..., device_memory_bytes: _Optional[int] = ..., vocab_size: _Optional[int] = ...) -> None: ...

class ParallelSizes(_message.Message):
    __slots__ = ("tensor", "pipeline", "data")
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    tensor: int
    pipeline: int
    data: int
    def __init__(self, tensor: _Optional[int] = ..., pipeline: _Optional[int] = ..., data: _Optional[int] = ...) -> None: ...

class TransferAddress(_message.Message):
    __slots__ = ("rank", "address")
    RANK_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    address: str
    def __init__(self, rank: _Optional[int] = ..., address: _Optional[str] = ...) -> None: ...

class Capabilities(_message.Message):
    __slots__ = ("envelope", "token_ids", "resume", "transfer_ids", "cache_salt", "admitted_through")
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_THROUGH_FIELD_NUMBER: _ClassVar[int]
    envelope: bool
    token_ids: bool
    resume: bool
    transfer_ids: bool
    cache_salt: bool
    admitted_through: bool
    def __init__(self, envelope: _Optional[bool] = ..., token_ids: _Optional[bool] = ..., resume: _Optional[bool] = ..., transfer_ids: _Optional[bool] = ..., cache_salt: _Optional[bool] = ..., admitted_through: _Optional[bool] = ...) -> None: ...

class GetTokenizerRequest(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: str
    def __init__(self, digest: _Optional[str] = ...) -> None: ...

class TokenizerFile(_message.Message):
    __slots__ = ("name", "data", "last")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    name: str
    data: bytes
    last: bool
    def __init__(self, name: _Optional[str] = ..., data: _Optional[bytes] = ..., last: _Optional[bool] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("hello", "snapshot_ack", "pace")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_ACK_FIELD_NUMBER: _ClassVar[int]
    PACE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    snapshot_ack: SnapshotAck
    pace: Pace
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., snapshot_ack: _Optional[_Union[SnapshotAck, _Mapping]] = ..., pace: _Optional[_Union[Pace, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("router_id", "router_version")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    ROUTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    router_version: str
    def __init__(self, router_id: _Optional[str] = ..., router_version: _Optional[str] = ...) -> None: ...

class SnapshotAck(_message.Message):
    __slots__ = ("epoch", "seq")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    epoch: bytes
    seq: int
    def __init__(self, epoch: _Optional[bytes] = ..., seq: _Optional[int] = ...) -> None: ...

class Pace(_message.Message):
    __slots__ = ("min_interval_s",)
    MIN_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    min_interval_s: float
    def __init__(self, min_interval_s: _Optional[float] = ...) -> None: ...

class WatchEvent(_message.Message):
    __slots__ = ("seq", "epoch", "snapshot_begin", "snapshot_chunk", "snapshot_end", "blocks", "load")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_BEGIN_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_CHUNK_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_END_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    seq: int
    epoch: bytes
    snapshot_begin: SnapshotBegin
    snapshot_chunk: SnapshotChunk
    snapshot_end: SnapshotEnd
    blocks: BlockDelta
    load: LoadReport
    def __init__(self, seq: _Optional[int] = ..., epoch: _Optional[bytes] = ..., snapshot_begin: _Optional[_Union[SnapshotBegin, _Mapping]] = ..., snapshot_chunk: _Optional[_Union[SnapshotChunk, _Mapping]] = ..., snapshot_end: _Optional[_Union[SnapshotEnd, _Mapping]] = ..., blocks: _Optional[_Union[BlockDelta, _Mapping]] = ..., load: _Optional[_Union[LoadReport, _Mapping]] = ...) -> None: ...

class SnapshotBegin(_message.Message):
    __slots__ = ("num_hashes",)
    NUM_HASHES_FIELD_NUMBER: _ClassVar[int]
    num_hashes: int
    def __init__(self, num_hashes: _Optional[int] = ...) -> None: ...

class SnapshotChunk(_message.Message):
    __slots__ = ("hashes", "tier")
    HASHES_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    hashes: bytes
    tier: Tier
    def __init__(self, hashes: _Optional[bytes] = ..., tier: _Optional[_Union[Tier, str]] = ...) -> None: ...

class SnapshotEnd(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class BlockDelta(_message.Message):
    __slots__ = ("cleared", "removed", "stored", "tier")
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    cleared: bool
    removed: bytes
    stored: bytes
    tier: Tier
    def __init__(self, cleared: _Optional[bool] = ..., removed: _Optional[bytes] = ..., stored: _Optional[bytes] = ..., tier: _Optional[_Union[Tier, str]] = ...) -> None: ...

class LoadReport(_message.Message):
    __slots__ = ("running", "waiting", "queued_prefill_tokens", "free_blocks", "evictable_blocks", "total_blocks", "free_device_bytes", "prefill_tokens_per_s", "step_time_s", "draining", "ready", "admitted_through", "admitted_beyond", "running_tokens", "num_preemptions", "uptime_s", "generated_tokens", "last_step_age_s")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EVICTABLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    STEP_TIME_S_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_THROUGH_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_BEYOND_FIELD_NUMBER: _ClassVar[int]
    RUNNING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_AGE_S_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    queued_prefill_tokens: int
    free_blocks: int
    evictable_blocks: int
    total_blocks: int
    free_device_bytes: int
    prefill_tokens_per_s: float
    step_time_s: float
    draining: bool
    ready: bool
    admitted_through: int
    admitted_beyond: _containers.RepeatedScalarFieldContainer[int]
    running_tokens: int
    num_preemptions: int
    uptime_s: float
    generated_tokens: int
    last_step_age_s: float
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., queued_prefill_tokens: _Optional[int] = ..., free_blocks: _Optional[int] = ..., evictable_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ..., free_device_bytes: _Optional[int] = ..., prefill_tokens_per_s: _Optional[float] = ..., step_time_s: _Optional[float] = ..., draining: _Optional[bool] = ..., ready: _Optional[bool] = ..., admitted_through: _Optional[int] = ..., admitted_beyond: _Optional[_Iterable[int]] = ..., running_tokens: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., uptime_s: _Optional[float] = ..., generated_tokens: _Optional[int] = ..., last_step_age_s: _Optional[float] = ...) -> None: ...
