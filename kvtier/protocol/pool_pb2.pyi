from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BlockStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MISS: _ClassVar[BlockStatus]
    HIT: _ClassVar[BlockStatus]
    PENDING: _ClassVar[BlockStatus]

class WriteStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STORED: _ClassVar[WriteStatus]
    EXISTS: _ClassVar[WriteStatus]
    FULL: _ClassVar[WriteStatus]
    THROTTLED: _ClassVar[WriteStatus]
    FAILED: _ClassVar[WriteStatus]
MISS: BlockStatus
HIT: BlockStatus
PENDING: BlockStatus
STORED: WriteStatus
EXISTS: WriteStatus
FULL: WriteStatus
THROTTLED: WriteStatus
FAILED: WriteStatus

class Keys(_message.Message):
    __slots__ = ("namespace_id", "hashes")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    hashes: bytes
    def __init__(self, namespace_id: _Optional[bytes] = ..., hashes: _Optional[bytes] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("groups",)
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[Keys]
    def __init__(self, groups: _Optional[_Iterable[_Union[Keys, _Mapping]]] = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("statuses",)
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    statuses: bytes
    def __init__(self, statuses: _Optional[bytes] = ...) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("groups",)
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[ReadGroup]
    def __init__(self, groups: _Optional[_Iterable[_Union[ReadGroup, _Mapping]]] = ...) -> None: ...

class ReadGroup(_message.Message):
    __slots__ = ("keys", "payload_bytes")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    keys: Keys
    payload_bytes: int
    def __init__(self, keys: _Optional[_Union[Keys, _Mapping]] = ..., payload_bytes: _Optional[int] = ...) -> None: ...

class Frames(_message.Message):
    __slots__ = ("frames",)
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    frames: _containers.RepeatedCompositeFieldContainer[Frame]
    def __init__(self, frames: _Optional[_Iterable[_Union[Frame, _Mapping]]] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("block", "status", "header", "payload")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    block: int
    status: BlockStatus
    header: bytes
    payload: bytes
    def __init__(self, block: _Optional[int] = ..., status: _Optional[_Union[BlockStatus, str]] = ..., header: _Optional[bytes] = ..., payload: _Optional[bytes] = ...) -> None: ...

class WriteResponse(_message.Message):
    __slots__ = ("statuses",)
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    statuses: bytes
    def __init__(self, statuses: _Optional[bytes] = ...) -> None: ...

class DiscardRequest(_message.Message):
    __slots__ = ("groups",)
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[Keys]
    def __init__(self, groups: _Optional[_Iterable[_Union[Keys, _Mapping]]] = ...) -> None: ...

class DiscardResponse(_message.Message):
    __slots__ = ("num_discarded",)
    NUM_DISCARDED_FIELD_NUMBER: _ClassVar[int]
    num_discarded: int
    def __init__(self, num_discarded: _Optional[int] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("groups", "ttl_ms")
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[Keys]
    ttl_ms: int
    def __init__(self, groups: _Optional[_Iterable[_Union[Keys, _Mapping]]] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class PinResponse(_message.Message):
    __slots__ = ("statuses", "ttl_ms")
    class Status(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        MISS: _ClassVar[PinResponse.Status]
        PINNED: _ClassVar[PinResponse.Status]
        FULL: _ClassVar[PinResponse.Status]
    MISS: PinResponse.Status
    PINNED: PinResponse.Status
    FULL: PinResponse.Status
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    statuses: bytes
    ttl_ms: int
    def __init__(self, statuses: _Optional[bytes] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("groups",)
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[Keys]
    def __init__(self, groups: _Optional[_Iterable[_Union[Keys, _Mapping]]] = ...) -> None: ...

class UnpinResponse(_message.Message):
    __slots__ = ("num_unpinned",)
    NUM_UNPINNED_FIELD_NUMBER: _ClassVar[int]
    num_unpinned: int
    def __init__(self, num_unpinned: _Optional[int] = ...) -> None: ...

class UsageRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UsageResponse(_message.Message):
    __slots__ = ("tiers",)
    TIERS_FIELD_NUMBER: _ClassVar[int]
    tiers: _containers.RepeatedCompositeFieldContainer[TierUsage]
    def __init__(self, tiers: _Optional[_Iterable[_Union[TierUsage, _Mapping]]] = ...) -> None: ...

class TierUsage(_message.Message):
    __slots__ = ("name", "num_blocks", "used_bytes", "capacity_bytes", "used_percent", "state")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        WRITABLE: _ClassVar[TierUsage.State]
        READ_ONLY: _ClassVar[TierUsage.State]
        OFF: _ClassVar[TierUsage.State]
    WRITABLE: TierUsage.State
    READ_ONLY: TierUsage.State
    OFF: TierUsage.State
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_PERCENT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    name: str
    num_blocks: int
    used_bytes: int
    capacity_bytes: int
    used_percent: int
    state: TierUsage.State
    def __init__(self, name: _Optional[str] = ..., num_blocks: _Optional[int] = ..., used_bytes: _Optional[int] = ..., capacity_bytes: _Optional[int] = ..., used_percent: _Optional[int] = ..., state: _Optional[_Union[TierUsage.State, str]] = ...) -> None: ...

class EventsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EventBatch(_message.Message):
    __slots__ = ("events", "lost")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[Event]
    lost: int
    def __init__(self, events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ..., lost: _Optional[int] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("kind", "tier", "keys")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STORED: _ClassVar[Event.Kind]
        REMOVED: _ClassVar[Event.Kind]
        CLEARED: _ClassVar[Event.Kind]
        WRITABLE: _ClassVar[Event.Kind]
        READ_ONLY: _ClassVar[Event.Kind]
        OFF: _ClassVar[Event.Kind]
    STORED: Event.Kind
    REMOVED: Event.Kind
    CLEARED: Event.Kind
    WRITABLE: Event.Kind
    READ_ONLY: Event.Kind
    OFF: Event.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    kind: Event.Kind
    tier: str
    keys: _containers.RepeatedCompositeFieldContainer[Keys]
    def __init__(self, kind: _Optional[_Union[Event.Kind, str]] = ..., tier: _Optional[str] = ..., keys: _Optional[_Iterable[_Union[Keys, _Mapping]]] = ...) -> None: ...
