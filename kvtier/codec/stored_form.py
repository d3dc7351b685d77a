"""The stored form: how a block looks wherever its bytes leave the memory of the process that made them.

    offset  bytes  field (little endian)
         0      4  magic "KVTB"
         4      2  version, 1
         6      1  codec (`Codec`)
         7      1  flags, 0
         8     64  store key: tenant id, namespace id, chain hash
        72      8  raw length: payload bytes before the codec
        80      8  stored length: payload bytes as stored, behind the header
        88      8  xxh3_64 over bytes 0 to 87, then the payload as stored
        96         payload

This module alone writes and reads it. Header and payload are separate arguments everywhere, so that
callers hand them to `writev` or `sendmsg` without joining them. All functions are pure and safe in
any thread; hashing a large payload (2 MiB: about 65 us), packing and unpacking release the GIL.

The checksum finds accidents, not attackers: xxh3 has no key.
"""

import enum
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.codec import bitshuffle, planes
from kvtier.errors import CorruptBlockError, InvalidInputError
from kvtier.identity.keys import STORE_KEY_BYTES, StoreKey
from kvtier.memory.pieces import Grid, Payload, Pieces, Target

HEADER_BYTES = 96
VERSION = 1

_MAGIC = b"KVTB"
_CHECKED_BYTES = HEADER_BYTES - 8
_FIELDS = struct.Struct("<4sHBB64sQQ")
_CHECKSUM = struct.Struct("<Q")

HEADER_DTYPE = np.dtype(
    [
        ("magic", "<u4"),
        ("version", "<u2"),
        ("codec", "u1"),
        ("flags", "u1"),
        ("key", "V64"),
        ("raw_length", "<u8"),
        ("stored_length", "<u8"),
        ("checksum", "<u8"),
    ]
)
"""The header as an array's element, for those who keep many of them."""

_WORTH_PACKING = 0.97
"""Above, unpacking costs more than the bytes it saves."""

_Buffer = bytes | bytearray | memoryview


class Codec(enum.IntEnum):
    """How the payload is packed. Lossless all."""

    RAW = 0
    """Not at all: raw and stored length are equal."""
    LZ4 = 1
    """Bitshuffled, then lz4: `kvtier.codec.bitshuffle`. The stored length is less than the raw one."""
    PLANES_ZSTD = 2
    """High bytes of 16-bit values apart, then zstd: `kvtier.codec.planes`. The stored length is less than the raw."""

    @property
    def label(self) -> str:
        """What configurations and metrics call it: `raw`, `lz4`, `planes-zstd`."""
        return self.name.lower().replace("_", "-")

    @classmethod
    def parse(cls, label: str) -> "Codec":
        """The codec of this label."""
        for codec in cls:
            if codec.label == label:
                return codec
        raise InvalidInputError(f"unknown codec {label!r}: known are {', '.join(codec.label for codec in cls)}")


_CODECS = frozenset(Codec)
"""What this release reads. A block of another codec is to it as one that is damaged: a miss, wherever it lies."""
_PIECE_BYTES = 512 << 10
"""What is copied and then looked at: half of a core's second-level cache."""


@dataclass(frozen=True, slots=True)
class Header:
    """A well-formed header. Says nothing yet about the payload: see `verify`."""

    key: StoreKey
    codec: Codec
    raw_length: int
    stored_length: int
    checksum: int


def encode(key: StoreKey, payload: _Buffer, codec: Codec = Codec.RAW) -> tuple[bytes, _Buffer]:
    """Header and payload as stored, the latter packed by `codec` where that saves at least 3 %.

    Else the block is stored raw, and the second part is `payload` itself, not a copy. `payload` is
    one-dimensional bytes.
    """
    packed = _pack(codec, payload)
    if packed is not None and len(packed) <= _WORTH_PACKING * len(payload):
        return _header(key, codec, len(payload), packed), packed
    return encode_header(key, payload), payload


def decode_into(header: _Buffer, key: StoreKey, stored: _Buffer, into: memoryview) -> None:
    """Fills `into` with the block of `key`, whatever its codec.

    Header, key, lengths and checksum are verified before `into` is touched. What a packed payload says
    of itself is checked too; when it turns out bad only while it is unpacked, `into` holds anything.

    Raises `CorruptBlockError` with the reason.

    :param stored: the payload as stored, exactly; in memory that nobody writes meanwhile.
    :param into: one-dimensional writable bytes, as many as the block has unpacked.
    """
    parsed = parse_stored_header(header)
    if parsed.raw_length != len(into):
        raise CorruptBlockError(f"block of {parsed.raw_length} bytes instead of {len(into)}")
    verify(parsed, key, stored)
    unpack(parsed, stored, into)


def checksum(key: StoreKey, payload: _Buffer) -> int:
    """xxh3_64 of the stored form of `payload` under `key`, raw, for a holder who keeps it apart from the bytes."""
    return _checksum(_prefix(key, Codec.RAW, len(payload), len(payload)), payload)


def copy_checked(key: StoreKey, into: Target, payload: Payload) -> int:
    """Copies a raw `payload` over the front of `into`; returns the `checksum` of what then stands there.

    For a `payload` that may change meanwhile, too. In parts, so that each is looked at while it is in the processor's
    cache: a third of the price of a second pass. Releases the GIL.

    :param into: as long as `payload`, where it is in pieces. One of the two may be.
    """
    nbytes = len(payload)
    hasher = xxhash.xxh3_64(_prefix(key, Codec.RAW, nbytes, nbytes))
    if isinstance(payload, Pieces):
        assert not isinstance(into, Pieces), "one of the two"
        for part, grid in _parts(into, payload):
            np.copyto(part, grid)
            hasher.update(part.data)
    elif isinstance(into, Pieces):
        for part, grid in _parts(payload, into):
            np.copyto(grid, part)
            for group in grid:
                for piece in group:
                    hasher.update(piece.data)
    elif nbytes:  # numpy refuses empty buffers
        source = np.frombuffer(payload, dtype=np.uint8)
        target = np.frombuffer(into, dtype=np.uint8, count=nbytes)
        for start in range(0, nbytes, _PIECE_BYTES):
            stop = min(start + _PIECE_BYTES, nbytes)
            np.copyto(target[start:stop], source[start:stop])
            hasher.update(into[start:stop])
    return int(hasher.intdigest())


def _parts(whole: _Buffer, pieces: Pieces) -> Iterator[tuple[Grid, Grid]]:
    """Pieces of a block, not too many at a time, behind the bytes of `whole` that belong there."""
    memory = np.frombuffer(whole, dtype=np.uint8)
    at = 0
    for grid in pieces.batches(_PIECE_BYTES):
        yield memory[at : at + grid.nbytes].reshape(grid.shape), grid
        at += grid.nbytes


class RunningChecksum:
    """`checksum` of a raw payload that comes piece by piece."""

    __slots__ = ("_hasher",)

    def __init__(self, key: StoreKey, nbytes: int) -> None:
        self._hasher = xxhash.xxh3_64(_prefix(key, Codec.RAW, nbytes, nbytes))

    def update(self, piece: _Buffer) -> None:
        """The next bytes. Releases the GIL."""
        self._hasher.update(piece)

    def value(self) -> int:
        return int(self._hasher.intdigest())


def encode_header(key: StoreKey, payload: _Buffer) -> bytes:
    """The 96 bytes that stand before `payload`, codec raw. `payload` is one-dimensional bytes."""
    return _header(key, Codec.RAW, len(payload), payload)


def header_from_checksum(key: StoreKey, raw_length: int, checksum: int) -> bytes:
    """The header of a raw payload whose `checksum` is known already. Costs no look at the payload."""
    return _prefix(key, Codec.RAW, raw_length, raw_length) + _CHECKSUM.pack(checksum)


def parse_header(buffer: _Buffer) -> Header:
    """Reads the first 96 bytes of `buffer`, of a raw block: what travels between processes.

    Raises `CorruptBlockError` with the reason when they are fewer, foreign, of a version or codec that
    this release does not know, or of a packed block.
    """
    header = parse_stored_header(buffer)
    if header.codec is not Codec.RAW:
        raise CorruptBlockError(f"codec {header.codec} ({header.codec.label}) where only raw is taken")
    return header


def parse_stored_header(buffer: _Buffer) -> Header:
    """`parse_header` of any codec, for those who store blocks and hand the payload to `decode_into`."""
    if len(buffer) < HEADER_BYTES:
        raise CorruptBlockError(f"truncated header: {len(buffer)} of {HEADER_BYTES} bytes")
    magic, version, number, flags, key, raw_length, stored_length = _FIELDS.unpack_from(buffer)
    if magic != _MAGIC:
        raise CorruptBlockError(f"no kvtier block: magic {magic!r}")
    if version != VERSION:
        raise CorruptBlockError(f"unknown version {version}")
    if number not in _CODECS:
        raise CorruptBlockError(f"unknown codec {number}")
    if flags:
        raise CorruptBlockError(f"unknown flags {flags:#04x}")
    codec = Codec(number)
    if (raw_length != stored_length) if codec is Codec.RAW else (raw_length <= stored_length):
        raise CorruptBlockError(f"{codec.label} codec with lengths {raw_length} and {stored_length}")
    (stored_checksum,) = _CHECKSUM.unpack_from(buffer, _CHECKED_BYTES)
    return Header(StoreKey(key), codec, raw_length, stored_length, stored_checksum)


def well_formed(headers: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    """Which of an array of `HEADER_DTYPE` `parse_stored_header` would take."""
    magic = headers["magic"] == int.from_bytes(_MAGIC, "little")
    raw, stored, codec = headers["raw_length"], headers["stored_length"], headers["codec"]
    lengths = np.where(codec == Codec.RAW, raw == stored, raw > stored)
    known = np.isin(codec, list(_CODECS))
    good: npt.NDArray[np.bool_] = magic & (headers["version"] == VERSION) & (headers["flags"] == 0) & known & lengths
    return good


def verify(header: Header, key: StoreKey, stored: _Buffer) -> None:
    """Passes when `stored` is, byte for byte, what was stored under `key`; else raises `CorruptBlockError`.

    :param key: the key that was asked for, so that a block in another's place is found out.
    :param stored: the payload as stored, packed or not.
    """
    if header.key != key:
        raise CorruptBlockError("block of another key")
    if len(stored) != header.stored_length:
        raise CorruptBlockError(f"truncated payload: {len(stored)} of {header.stored_length} bytes")
    if _checksum(_prefix(key, header.codec, header.raw_length, header.stored_length), stored) != header.checksum:
        raise CorruptBlockError("checksum mismatch")


def unpack(header: Header, stored: _Buffer, into: memoryview) -> None:
    """The last step of `decode_into`, for a payload that `verify` has passed and an `into` of its raw length."""
    if header.codec is Codec.LZ4:
        bitshuffle.unpack_into(stored, into)
    elif header.codec is Codec.PLANES_ZSTD:
        planes.unpack_into(stored, into)
    elif into:  # numpy refuses empty buffers
        np.copyto(np.frombuffer(into, dtype=np.uint8), np.frombuffer(stored, dtype=np.uint8))  # releases the GIL


def decode(header: _Buffer, key: StoreKey, payload: _Buffer) -> Header:
    """`parse_header` and `verify` in one step: for raw blocks."""
    parsed = parse_header(header)
    verify(parsed, key, payload)
    return parsed


def _pack(codec: Codec, payload: _Buffer) -> _Buffer | None:
    """None where the codec cannot, or does nothing."""
    if codec is Codec.LZ4:
        return bitshuffle.pack(payload)
    return planes.pack(payload) if codec is Codec.PLANES_ZSTD else None


def _header(key: StoreKey, codec: Codec, raw_length: int, stored: _Buffer) -> bytes:
    prefix = _prefix(key, codec, raw_length, len(stored))
    return prefix + _CHECKSUM.pack(_checksum(prefix, stored))


def _checksum(prefix: bytes, stored: _Buffer) -> int:
    hasher = xxhash.xxh3_64(prefix)
    hasher.update(stored)
    return int(hasher.intdigest())


def _prefix(key: StoreKey, codec: Codec, raw_length: int, stored_length: int) -> bytes:
    """Bytes 0 to 87."""
    if len(key) != STORE_KEY_BYTES:  # struct would pad or cut it without a word
        raise InvalidInputError(f"store key of {len(key)} bytes: needs {STORE_KEY_BYTES}")
    return _FIELDS.pack(_MAGIC, VERSION, codec, 0, key, raw_length, stored_length)
