"""The stored form of sealed blocks: on disk and in Redis for tenants with a storage key.

The header is that of version 2 with the flag for sealed blocks and the key's id. Its checksum is of the block as
stored, so that accidents are found without a key; the writer's is inside (`kvtier.codec.sealing`). What is sealed is
the payload as its codec has packed it, with nothing behind it. The tag of GCM covers bytes 0 to 87 of the header: the
store key, the codec, the key's id and all lengths. All functions are pure and safe in any thread, and release the GIL.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvtier.codec.checksums import checksum as checksum_of
from kvtier.codec.sealing import SEAL_BYTES, SealingKeys, room_for
from kvtier.codec.stored_form import (
    HEADER_BYTES,
    VERSION,
    Codec,
    Header,
    pack,
    pack_header,
    sum_stored,
    unpack_as,
    verify,
)
from kvtier.errors import SealedBlockError, SealFault
from kvtier.identity.keys import TENANT_ID_BYTES, StoreKey, TenantId

_CHECKSUM = struct.Struct("<Q")
_Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class StorageSeal:
    """How one tenant's blocks are stored where it has keys."""

    keys: SealingKeys
    reads_plain: bool = False
    """Whether blocks that are not sealed are read, e.g. those of before there were keys. Anybody who can write to the
    disk or the Redis can put such blocks there."""


@dataclass(slots=True, eq=False)
class StorageSeals:
    """The seals of all tenants that have keys. Any thread."""

    by_tenant: Mapping[TenantId, StorageSeal]
    """Never changed, but replaced as a whole by a pool that follows its configuration."""

    def of(self, key: StoreKey) -> StorageSeal | None:
        """The seal of the key's tenant; None: its blocks are stored as they are."""
        return self.by_tenant.get(TenantId(key[:TENANT_ID_BYTES])) if self.by_tenant else None


NO_SEALS = StorageSeals({})
"""The seals of a store whose tenants have no keys."""


def seal(key: StoreKey, payload: _Buffer, checksum: int, codec: Codec, keys: SealingKeys) -> tuple[bytes, memoryview]:
    """Header and payload as stored, packed by `codec` where that saves at least 3 %, and sealed.

    :param checksum: the writer's. It is taken over as it is: when `payload` has changed since, no reader takes it.
    """
    packed = pack(codec, payload)
    inner = payload if packed is None else packed
    stored = room_for(len(inner))
    used = Codec.RAW if packed is None else codec
    head = pack_header(Header(key, used, len(payload), len(stored), 0, VERSION, keys.newest))
    keys.seal_into(_bound(head), checksum, inner, stored)
    return _bound(head) + _CHECKSUM.pack(sum_stored(head, stored)), stored


def open_into(header: Header, key: StoreKey, stored: _Buffer, into: memoryview, keys: SealingKeys) -> None:
    """Fills `into` with the block of `key`; raises `SealedBlockError` when that cannot be, and `CorruptBlockError` for
    what was changed by accident. Then `into` holds anything.

    :param header: of a sealed block.
    :param stored: the payload as stored, in memory that nobody else can write to meanwhile.
    :param into: as many bytes as the block has unpacked.
    """
    if header.key != key:
        raise SealedBlockError(SealFault.ALTERED, "block of another key")
    if len(stored) != header.stored_length or len(into) != header.raw_length:
        raise SealedBlockError(SealFault.ALTERED, f"truncated payload: {len(stored)} of {header.stored_length} bytes")
    is_raw = header.codec is Codec.RAW
    inner = into if is_raw else np.empty(header.stored_length - SEAL_BYTES, np.uint8).data
    try:
        expected = keys.open_into(header.key_id, _bound(pack_header(header)), stored, inner)
    except SealedBlockError:
        verify(header, key, stored)  # an accident is no forgery, and no key that is missing
        raise
    if not is_raw:
        unpack_as(header.codec, inner, into)
    if checksum_of(key, into) != expected:
        raise SealedBlockError(SealFault.CHANGED_BEFORE, "opened, but its bytes changed before they were sealed")


def _bound(head: bytes) -> bytes:
    """What of a header the tag covers."""
    return head[: HEADER_BYTES - _CHECKSUM.size]
