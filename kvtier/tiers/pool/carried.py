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
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from functools import partial

import numpy as np

from kvtier.codec.checksums import RunningChecksum
from kvtier.codec.checksums import checksum as checksum_of
from kvtier.codec.sealing import FRONT_BYTES, SEAL_BYTES, TAG_BYTES, Opener, Sealer
from kvtier.errors import CorruptBlockError, SealedBlockError, SealFault
from kvtier.identity.keys import StoreKey
from kvtier.memory.pages import copy_bytes
from kvtier.memory.pieces import Payload, Target, together
from kvtier.memory.pieces import land as land_pieces
from kvtier.memory.pieces import landing as landing_of
from kvtier.tiers.base import Item
from kvtier.tiers.pool.carriage import HELPED_FROM_BYTES, Carriage

_MAGIC = b"KVTS"
_FRONT = struct.Struct("<4sI")
_LENGTH = struct.Struct("<Q")
CARRIED_BYTES = _FRONT.size + SEAL_BYTES
"""How many more bytes a payload has on its way when it is sealed."""
_HEAD_BYTES = _FRONT.size + FRONT_BYTES
"""How many of them stand before the ciphertext."""
_PIECE_BYTES = 256 << 10
"""What is sealed, looked at and copied before the next: well within a core's second-level cache."""
_CACHE_LINE_BYTES = 64


class _OwnRoom(threading.local):
    """Memory of each thread for one piece, and what stands before and behind it."""

    def __init__(self) -> None:
        self.memory = np.empty(_CACHE_LINE_BYTES + _PIECE_BYTES + TAG_BYTES, np.uint8).data


_own_room = _OwnRoom()


class SealedPayload:
    """A block to be written, as long as it is once it is sealed. Immutable: any thread; the payload is the caller's."""

    __slots__ = ("_checksum", "_key", "_payload", "carriage")

    def __init__(self, item: Item[Payload], carriage: Carriage) -> None:
        self._key, self._payload, self._checksum = item
        self.carriage = carriage

    def __len__(self) -> int:
        return len(self._payload) + CARRIED_BYTES

    def sealed(self) -> tuple[memoryview, int]:
        """The block as it travels, in memory of the carriage's rooms, and its checksum. Sealed twice it is other
        bytes."""
        whole = self._whole()
        return whole, checksum_of(self._key, whole)

    def sealing_to(self, place: memoryview) -> Callable[[], int]:
        """What copies the block as it travels to `place`, as long as this, which others can write to, and then returns
        the checksum of what was copied. To be called once.

        A large block is sealed piece by piece, so that each is looked at and copied in the cache. What that needs is
        made here, for all blocks of a batch before the first is moved: with empty caches it takes six times as long.
        """
        pieces = (
            self._pieces(self._sealer()) if len(self._payload) > _PIECE_BYTES else map(SealedPayload._whole, [self])
        )
        return partial(self._copy, pieces, place)

    def _copy(self, pieces: Iterator[memoryview], place: memoryview) -> int:
        running = RunningChecksum(self._key, len(self))
        at = 0
        for piece in pieces:
            running.update(piece)
            copy_bytes(place[at:], piece)
            at += len(piece)
        return running.value()

    def _sealer(self) -> Sealer:
        keys = self.carriage.keys
        return keys.sealer(_bound(_FRONT.pack(_MAGIC, keys.newest), self._key, len(self._payload)), self._checksum)

    def _whole(self) -> memoryview:
        keys, payload = self.carriage.keys, together(self._payload)
        whole = self.carriage.rooms.take(len(self))
        front = _FRONT.pack(_MAGIC, keys.newest)
        whole[: _FRONT.size] = front
        keys.seal_into(_bound(front, self._key, len(payload)), self._checksum, payload, whole[_FRONT.size :])
        return whole

    def _pieces(self, sealer: Sealer) -> Iterator[memoryview]:
        """The block as it travels, piece by piece in the same memory, which is the thread's that iterates."""
        payload, room = together(self._payload), _own_room.memory
        begin = _CACHE_LINE_BYTES - _HEAD_BYTES
        room[begin:_CACHE_LINE_BYTES] = _FRONT.pack(_MAGIC, self.carriage.keys.newest) + sealer.front
        for start in range(0, len(payload), _PIECE_BYTES):
            piece = memoryview(payload)[start : start + _PIECE_BYTES]
            end = _CACHE_LINE_BYTES + len(piece)
            sealer.update_into(piece, room[_CACHE_LINE_BYTES:end])
            if start + len(piece) == len(payload):
                room[end : end + TAG_BYTES] = sealer.tag()
                end += TAG_BYTES
            yield room[begin:end]
            begin = _CACHE_LINE_BYTES


class SealedTarget:
    """The place at which a sealed block is to be opened, as long as it is before. Any thread; the target is the
    caller's."""

    __slots__ = ("_key", "_target", "carriage")

    def __init__(self, key: StoreKey, target: Target, carriage: Carriage) -> None:
        self._key, self._target, self.carriage = key, target, carriage

    def __len__(self) -> int:
        return len(self._target) + CARRIED_BYTES

    def opening(self, carried: memoryview, *, is_shared: bool) -> Callable[[], CorruptBlockError | None]:
        """What fills the target from a block as it travelled; it returns what is wrong with the block if that cannot
        be, and then the target holds anything. To be called once. What that needs is made here, see `sealing_to`.

        :param carried: as long as this.
        :param is_shared: others can write to `carried` meanwhile: each byte is copied out of it once, and opened in
            memory of this process.
        """
        head = bytes(carried[:_HEAD_BYTES])
        magic, key_id = _FRONT.unpack_from(head)
        if magic != _MAGIC:
            plain = SealedBlockError(SealFault.PLAIN, "not sealed, and its tenant has sealing_keys")
            return lambda: plain
        bound = _bound(head[: _FRONT.size], self._key, len(self._target))
        try:
            opener = self.carriage.keys.opener(key_id, bound, head[_FRONT.size :])
        except SealedBlockError as error:
            unknown = error
            return lambda: unknown
        return partial(self._open, opener, carried, is_shared)

    def _open(self, opener: Opener, carried: memoryview, is_shared: bool) -> CorruptBlockError | None:
        into = landing_of(self._target)
        running = RunningChecksum(self._key, len(into))
        for start in range(0, len(into), _PIECE_BYTES):
            opened = into[start : start + _PIECE_BYTES]
            piece = carried[_HEAD_BYTES + start :][: len(opened)]
            if is_shared:
                own = _own_room.memory[: len(opened)]
                copy_bytes(own, piece)
                piece = own
            opener.update_into(piece, opened)
            running.update(opened)
        try:
            expected = opener.finish(bytes(carried[-TAG_BYTES:]))
        except SealedBlockError as error:
            return error
        if running.value() != expected:
            return SealedBlockError(SealFault.CHANGED_BEFORE, "opened, but its bytes changed before they were sealed")
        land_pieces(into, self._target)
        return None


Outgoing = Payload | SealedPayload
"""What a transport writes."""
Incoming = Target | SealedTarget
"""What a transport reads into."""


def sealed_items(items: Sequence[Item[Payload]], by: Carriage | None) -> Sequence[Item[Outgoing]]:
    """Blocks to be written, sealed where there are keys. The checksums of sealed ones say nothing: see `carried`."""
    return items if by is None else [(item[0], SealedPayload(item, by), item[2]) for item in items]


def sealed_targets(keys: Sequence[StoreKey], into: Sequence[Target], by: Carriage | None) -> Sequence[Incoming]:
    """Targets of a read; where there are keys, of sealed blocks only."""
    return into if by is None else [SealedTarget(key, target, by) for key, target in zip(keys, into, strict=True)]


def helper_of(block: Outgoing | Incoming) -> Executor | None:
    """The thread that helps with blocks like this one; None where they are not sealed, or too small for it to pay."""
    if isinstance(block, SealedPayload | SealedTarget) and len(block) >= HELPED_FROM_BYTES:
        return block.carriage.helper
    return None


def carried(item: Item[Outgoing]) -> tuple[Payload, int]:
    """What travels of a block, and its checksum. Seals it, where it is to be; then `has_left` when it is sent."""
    _, payload, checksum = item
    return payload.sealed() if isinstance(payload, SealedPayload) else (payload, checksum)


def has_left(item: Item[Outgoing], travelled: Payload) -> None:
    """What `carried` gave for a block is not needed any more."""
    if isinstance(item[1], SealedPayload) and isinstance(travelled, memoryview):
        item[1].carriage.rooms.give(travelled)


def landing(target: Incoming) -> memoryview:
    """The memory that bytes which come one after the other may go to: the target itself, or memory that `land` takes
    them from."""
    return target.carriage.rooms.take(len(target)) if isinstance(target, SealedTarget) else landing_of(target)


def land(landed: memoryview, target: Incoming) -> CorruptBlockError | None:
    """What has come in the memory of `landing`, and is what the pool has, goes where it belongs; or what is wrong with
    it. The memory is not looked at any more."""
    if isinstance(target, SealedTarget):
        fault = target.opening(landed, is_shared=False)()
        target.carriage.rooms.give(landed)
        return fault
    land_pieces(landed, target)
    return None


def _bound(front: bytes, key: StoreKey, nbytes: int) -> bytes:
    """What the tag covers besides."""
    return front + key + _LENGTH.pack(nbytes)
