"""Blocks that are sealed on their way to a pool, and opened on their way back, by keys that the pool has not got.

A sealed block is to the pool a block of other bytes, 56 more of them:

    offset  bytes  field
         0      4  magic "KVTS"
         4      4  id of the key (u32, little endian)
         8         the payload as `kvtier.codec.sealing` seals it, bound to the 8 bytes before, the store key, and the
                   length of the payload (u64, little endian)

Its checksum at the pool is of these bytes; the writer's own is inside. Blocks are sealed one by one, as they are sent,
in memory of this process: into memory that the pool can write to only what is finished is copied, and nothing is opened
there, or it could be changed between the look at its tag and the use of its bytes. What comes through a socket is
opened piece by piece as it comes (`SealedArrival`).
"""

import struct
import threading
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from kvtier.codec.checksums import RunningChecksum
from kvtier.codec.checksums import checksum as checksum_of
from kvtier.codec.sealing import FRONT_BYTES, SEAL_BYTES, TAG_BYTES, Sealer, SealingKeys
from kvtier.errors import CorruptBlockError, SealedBlockError, SealFault
from kvtier.identity.keys import StoreKey
from kvtier.memory.pages import copy_bytes
from kvtier.memory.pieces import Payload, Target, together
from kvtier.memory.pieces import land as land_pieces
from kvtier.memory.pieces import landing as landing_of
from kvtier.protocol.arriving import CHECKSUM, parse_asked_for
from kvtier.tiers.base import Item
from kvtier.tiers.pool.carriage import Carriage

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
Buffer = bytes | memoryview


class _OwnRoom(threading.local):
    """Memory of each thread: for one piece, and what stands before and behind it, and for pieces that arrive."""

    def __init__(self) -> None:
        self.memory = np.empty(_CACHE_LINE_BYTES + _PIECE_BYTES + TAG_BYTES, np.uint8).data
        self._arriving = np.empty(3 * _PIECE_BYTES, np.uint8).data
        """What one call receives is less than two pieces, and what is left of the end is less than one."""
        self._at = 0

    def for_arriving(self, nbytes: int) -> memoryview:
        """Memory for at most a piece, until nearly two pieces more were asked for."""
        if self._at + nbytes > len(self._arriving):
            self._at = 0
        start, self._at = self._at, self._at + nbytes
        return self._arriving[start : self._at]


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
        """The block as it travels, in memory of its own, and its checksum. Sealed twice it is other bytes."""
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

    def streamed(self) -> Iterator[Buffer]:
        """The block as it travels, piece by piece, and then its checksum. A piece is in the cache, in memory of the
        thread that iterates, and is to be sent before the next one is asked for."""
        running = RunningChecksum(self._key, len(self))
        for piece in self._pieces(self._sealer()):
            running.update(piece)
            yield piece
        yield CHECKSUM.pack(running.value())

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
        whole = np.empty(len(self), np.uint8).data
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


class _Opening:
    """A sealed block that is opened from its beginning to its end. One thread."""

    __slots__ = ("_opener", "_running")

    def __init__(self, key: StoreKey, nbytes: int, head: bytes, keys: SealingKeys) -> None:
        """Raises `SealedBlockError` for a block that nobody here can open.

        :param nbytes: of the payload.
        :param head: what stands before the ciphertext.
        """
        magic, key_id = _FRONT.unpack_from(head)
        if magic != _MAGIC:
            raise SealedBlockError(SealFault.PLAIN, "not sealed, and its tenant has sealing_keys")
        self._opener = keys.opener(key_id, _bound(head[: _FRONT.size], key, nbytes), head[_FRONT.size :])
        self._running = RunningChecksum(key, nbytes)

    def open_into(self, piece: memoryview, into: memoryview) -> None:
        """Fills `into` with the next piece, in memory that nobody else can write to."""
        self._opener.update_into(piece, into)
        self._running.update(into)

    def fault(self, tag: bytes) -> SealedBlockError | None:
        """What is wrong with the block; all of it has been opened."""
        try:
            expected = self._opener.finish(tag)
        except SealedBlockError as error:
            return error
        if self._running.value() != expected:
            return SealedBlockError(SealFault.CHANGED_BEFORE, "opened, but its bytes changed before they were sealed")
        return None


class SealedTarget:
    """The place at which a sealed block is to be opened, as long as it is before. Any thread; the target is the
    caller's."""

    __slots__ = ("carriage", "key", "target")

    def __init__(self, key: StoreKey, target: Target, carriage: Carriage) -> None:
        self.key, self.target, self.carriage = key, target, carriage

    def __len__(self) -> int:
        return len(self.target) + CARRIED_BYTES

    def opening(self, carried: memoryview, *, is_shared: bool) -> Callable[[], CorruptBlockError | None]:
        """What fills the target from a block as it travelled; it returns what is wrong with the block if that cannot
        be, and then the target holds anything. To be called once. What that needs is made here, see `sealing_to`.

        :param carried: as long as this.
        :param is_shared: others can write to `carried` meanwhile: each byte is copied out of it once, and opened in
            memory of this process.
        """
        try:
            opening = _Opening(self.key, len(self.target), bytes(carried[:_HEAD_BYTES]), self.carriage.keys)
        except SealedBlockError as error:
            unknown = error
            return lambda: unknown
        return partial(self._open, opening, carried, is_shared)

    def _open(self, opening: _Opening, carried: memoryview, is_shared: bool) -> CorruptBlockError | None:
        into = landing_of(self.target)
        for start in range(0, len(into), _PIECE_BYTES):
            opened = into[start : start + _PIECE_BYTES]
            piece = carried[_HEAD_BYTES + start :][: len(opened)]
            if is_shared:
                own = _own_room.memory[: len(opened)]
                copy_bytes(own, piece)
                piece = own
            opening.open_into(piece, opened)
        fault = opening.fault(bytes(carried[-TAG_BYTES:]))
        if fault is None:
            land_pieces(into, self.target)
        return fault


class SealedArrival:
    """`Arriving`: a sealed block that comes through a socket. Each piece is opened while it is in the processor's
    cache, from memory of the thread to where the block belongs. One thread.

    The pool's checksum, of the same bytes as the tag, is not looked at: what the tag covers has changed nowhere since
    it was sealed, and the writer's checksum inside tells of what changed before.
    """

    __slots__ = ("_at", "_into", "_opening", "_target", "fault", "nbytes", "tag")

    def __init__(self, tag: int, header: bytes, target: SealedTarget, into: memoryview) -> None:
        """
        :param tag: the caller's.
        :param into: as long as the block when it is opened; holds anything when it has a fault.
        """
        self.tag = tag
        self.nbytes = len(target)
        self.fault: CorruptBlockError | None = None
        """Why it is not what was stored, known when it is complete."""
        self._target = target
        self._into = into
        self._at = 0
        """How much of it is filled."""
        self._opening: _Opening | None = None
        try:
            parse_asked_for(header, target.key, self.nbytes)
        except CorruptBlockError as error:
            self.fault = error

    def part(self, start: int, most: int) -> memoryview:
        """Returns the memory that the next bytes of the block go to."""
        at = start - _HEAD_BYTES
        if at < 0:
            return memoryview(bytearray(_HEAD_BYTES))
        if at == len(self._into):
            return memoryview(bytearray(TAG_BYTES))
        return _own_room.for_arriving(min(most, _PIECE_BYTES, len(self._into) - at))

    def note(self, part: memoryview, *, is_last: bool) -> None:
        """The next part has arrived. Opens it."""
        if self.fault is not None:
            return
        if is_last:
            assert self._opening is not None, "the head is before the tag"
            self.fault = self._opening.fault(bytes(part))
        elif self._opening is not None:
            self._opening.open_into(part, self._into[self._at : self._at + len(part)])
            self._at += len(part)
        else:
            try:
                self._opening = _Opening(self._target.key, len(self._into), bytes(part), self._target.carriage.keys)
            except SealedBlockError as error:
                self.fault = error


def _bound(front: bytes, key: StoreKey, nbytes: int) -> bytes:
    """What the tag covers besides."""
    return front + key + _LENGTH.pack(nbytes)
