"""Blocks on their way to and from a pool: as they are, or sealed with keys that the pool has not got.

A sealed block is to the pool a block of other bytes, 56 more of them:

    offset  bytes  field
         0      4  magic "KVTS"
         4      4  id of the key (u32, little endian)
         8         the payload as `kvtier.codec.sealing` seals it, bound to the 8 bytes before, the store key, and the
                   length of the payload (u64, little endian)

Its checksum at the pool is of these bytes; the writer's own is inside. Blocks are sealed one by one, as they are sent,
in memory of this process: into memory that the pool can write to only what is finished is copied, and nothing is opened
there, or it could be changed between the look at its tag and the use of its bytes.
"""

import struct
from collections.abc import Sequence

import numpy as np

from kvtier.codec.checksums import checksum as checksum_of
from kvtier.codec.sealing import SEAL_BYTES, SealingKeys
from kvtier.errors import CorruptBlockError, SealedBlockError, SealFault
from kvtier.identity.keys import StoreKey
from kvtier.memory.pieces import Payload, Target, together
from kvtier.memory.pieces import land as land_pieces
from kvtier.memory.pieces import landing as landing_of
from kvtier.tiers.base import Item

_MAGIC = b"KVTS"
_FRONT = struct.Struct("<4sI")
_LENGTH = struct.Struct("<Q")
CARRIED_BYTES = _FRONT.size + SEAL_BYTES
"""How many more bytes a payload has on its way when it is sealed."""


class SealedPayload:
    """A block to be written, as long as it is once it is sealed. Immutable: any thread; the payload is the caller's."""

    __slots__ = ("_checksum", "_key", "_keys", "_payload")

    def __init__(self, item: Item[Payload], keys: SealingKeys) -> None:
        self._key, self._payload, self._checksum = item
        self._keys = keys

    def __len__(self) -> int:
        return len(self._payload) + CARRIED_BYTES

    def sealed(self) -> tuple[memoryview, int]:
        """The block as it travels, in fresh memory, and its checksum. Sealed twice it is other bytes."""
        payload = together(self._payload)
        whole = np.empty(len(self), np.uint8).data
        front = _FRONT.pack(_MAGIC, self._keys.newest)
        whole[: _FRONT.size] = front
        self._keys.seal_into(_bound(front, self._key, len(payload)), self._checksum, payload, whole[_FRONT.size :])
        return whole, checksum_of(self._key, whole)


class SealedTarget:
    """The place at which a sealed block is to be opened, as long as it is before. Any thread; the target is the
    caller's."""

    __slots__ = ("_key", "_keys", "_target")

    def __init__(self, key: StoreKey, target: Target, keys: SealingKeys) -> None:
        self._key, self._target, self._keys = key, target, keys

    def __len__(self) -> int:
        return len(self._target) + CARRIED_BYTES

    def open(self, landed: memoryview) -> CorruptBlockError | None:
        """Fills the target from a block as it travelled; what is wrong with it if that cannot be, and then the target
        holds anything.

        :param landed: as long as this, in memory that nobody else can write to meanwhile.
        """
        magic, key_id = _FRONT.unpack_from(landed)
        if magic != _MAGIC:
            return SealedBlockError(SealFault.PLAIN, "not sealed, and its tenant has sealing_keys")
        into = landing_of(self._target)
        bound = _bound(bytes(landed[: _FRONT.size]), self._key, len(into))
        try:
            expected = self._keys.open_into(key_id, bound, landed[_FRONT.size :], into)
        except SealedBlockError as error:
            return error
        if checksum_of(self._key, into) != expected:
            return SealedBlockError(SealFault.CHANGED_BEFORE, "opened, but its bytes changed before they were sealed")
        land_pieces(into, self._target)
        return None


Outgoing = Payload | SealedPayload
"""What a transport writes."""
Incoming = Target | SealedTarget
"""What a transport reads into."""


def sealed_items(items: Sequence[Item[Payload]], keys: SealingKeys | None) -> Sequence[Item[Outgoing]]:
    """Blocks to be written, sealed where there are keys. The checksums of sealed ones say nothing: see `carried`."""
    return items if keys is None else [(item[0], SealedPayload(item, keys), item[2]) for item in items]


def sealed_targets(keys: Sequence[StoreKey], into: Sequence[Target], by: SealingKeys | None) -> Sequence[Incoming]:
    """Targets of a read; where there are keys, of sealed blocks only."""
    return into if by is None else [SealedTarget(key, target, by) for key, target in zip(keys, into, strict=True)]


def carried(item: Item[Outgoing]) -> tuple[Payload, int]:
    """What travels of a block, and its checksum. Seals it, where it is to be."""
    _, payload, checksum = item
    return payload.sealed() if isinstance(payload, SealedPayload) else (payload, checksum)


def landing(target: Incoming) -> memoryview:
    """The memory that bytes which come one after the other may go to: the target itself, or memory that `land` takes
    them from."""
    return np.empty(len(target), np.uint8).data if isinstance(target, SealedTarget) else landing_of(target)


def land(landed: memoryview, target: Incoming) -> CorruptBlockError | None:
    """What has come, and is what the pool has, goes where it belongs; or what is wrong with it."""
    if isinstance(target, SealedTarget):
        return target.open(landed)
    land_pieces(landed, target)
    return None


def _bound(front: bytes, key: StoreKey, nbytes: int) -> bytes:
    """What the tag covers besides."""
    return front + key + _LENGTH.pack(nbytes)
