"""The checksum of a block: computed once, by whoever writes it, and kept beside it wherever the block goes.

It is xxh3_64 over 88 bytes that name the key and the length, and then the payload as it is before any codec: what
version 1 of the stored form has in its header for a raw block. Whoever reads a block, from whatever tier and unpacked
from whatever codec, computes it over the key that was asked for and the bytes that came, and compares. Nobody
on the way computes it anew: bytes that change after their writer has summed them then match nothing.

All functions are pure and safe in any thread, and release the GIL while they look at a large payload (2 MiB: about
65 us). The checksum finds accidents, not attackers: xxh3 has no key.
"""

import struct
from collections.abc import Iterator

import numpy as np
import xxhash

from kvtier.errors import InvalidInputError
from kvtier.identity.keys import STORE_KEY_BYTES, StoreKey
from kvtier.memory.pieces import Grid, Payload, Pieces, Target

MAGIC = b"KVTB"

_FIELDS = struct.Struct("<4sHBB64sQQ")
PREFIX_BYTES = _FIELDS.size
_RAW_VERSION, _RAW_CODEC = 1, 0
_PIECE_BYTES = 512 << 10
"""What is copied and then looked at: half of a core's second-level cache."""
_Buffer = bytes | bytearray | memoryview


def prefix(key: StoreKey, nbytes: int) -> bytes:
    """The 88 bytes that are summed before a payload of `nbytes`."""
    if len(key) != STORE_KEY_BYTES:  # struct would pad or cut it without a word
        raise InvalidInputError(f"store key of {len(key)} bytes: needs {STORE_KEY_BYTES}")
    return _FIELDS.pack(MAGIC, _RAW_VERSION, _RAW_CODEC, 0, key, nbytes, nbytes)


def checksum(key: StoreKey, payload: Payload) -> int:
    """The checksum of `payload` under `key`. `payload` is one-dimensional bytes, or in pieces."""
    running = RunningChecksum(key, len(payload))
    if isinstance(payload, Pieces):
        for grid in payload.batches(_PIECE_BYTES):  # together: looking at small pieces one by one takes far longer
            running.update(np.ascontiguousarray(grid).data.cast("B"))
    else:
        running.update(payload)
    return running.value()


def copy_checked(key: StoreKey, into: Target, payload: memoryview) -> int:
    """Copies a `payload` over the front of `into`; returns the `checksum` of what then stands there.

    For a `payload` that may change meanwhile, too. In parts, so that each is looked at while it is in the processor's
    cache: a third of the price of a second pass. Releases the GIL.

    :param into: as long as `payload`, where it is in pieces.
    """
    nbytes = len(payload)
    running = RunningChecksum(key, nbytes)
    if isinstance(into, Pieces):
        for part, grid in _parts(payload, into):
            np.copyto(grid, part)
            for group in grid:
                for piece in group:
                    running.update(piece.data)
    elif nbytes:  # numpy refuses empty buffers
        source = np.frombuffer(payload, dtype=np.uint8)
        target = np.frombuffer(into, dtype=np.uint8, count=nbytes)
        for start in range(0, nbytes, _PIECE_BYTES):
            stop = min(start + _PIECE_BYTES, nbytes)
            np.copyto(target[start:stop], source[start:stop])
            running.update(into[start:stop])
    return running.value()


class RunningChecksum:
    """`checksum` of a payload that comes piece by piece."""

    __slots__ = ("_hasher",)

    def __init__(self, key: StoreKey, nbytes: int) -> None:
        self._hasher = xxhash.xxh3_64(prefix(key, nbytes))

    def update(self, piece: _Buffer) -> None:
        """The next bytes. Releases the GIL."""
        self._hasher.update(piece)

    def value(self) -> int:
        return int(self._hasher.intdigest())


def _parts(whole: _Buffer, pieces: Pieces) -> Iterator[tuple[Grid, Grid]]:
    """Pieces of a block, not too many at a time, behind the bytes of `whole` that belong there."""
    memory = np.frombuffer(whole, dtype=np.uint8)
    at = 0
    for grid in pieces.batches(_PIECE_BYTES):
        yield memory[at : at + grid.nbytes].reshape(grid.shape), grid
        at += grid.nbytes
