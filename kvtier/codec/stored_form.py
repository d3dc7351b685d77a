"""The stored form: how a block looks wherever its bytes leave the memory of the process that made them.

    offset  bytes  field (little endian)
         0      4  magic "KVTB"
         4      2  version: 1 for a block that is stored raw, 2 for others
         6      1  codec (`Codec`)
         7      1  flags: bit 0 sealed (version 2, `kvtier.codec.sealed_form`); the others are 0
         8     64  store key: tenant id, namespace id, chain hash
        72      4  raw length: payload bytes before the codec
        76      4  id of the key that it is sealed with; 0: not sealed
        80      4  stored length: payload bytes as stored, behind the header
        84      4  0
        88      8  checksum of the payload before the codec, as its writer computed it (`kvtier.codec.checksums`);
                   of a sealed block, xxh3_64 over bytes 0 to 87 and the payload as stored
        96         payload; in version 2, where it is packed and not sealed, its last 8 bytes are xxh3_64 of all bytes
                   before them, the header's included

What is stored raw and has nothing more to say is version 1, in which lengths have 8 bytes: blocks that travel raw
are the same to every release. Version 1 was also written packed; there the checksum is xxh3_64 over bytes 0 to 87
and the payload as packed. It is read for as long as such blocks may lie on disks and in Redis.

A form that this release does not know, whatever is new about it, is refused before anything of the payload is
believed: a miss. This module knows the header of sealed blocks, and whether they are as they were stored, for which no
key is needed.

This module and `kvtier.codec.sealed_form` alone write and read it. Header and payload are separate arguments
everywhere, so that callers hand them to `writev` or `sendmsg` without joining them. All functions are pure and safe in
any thread; hashing a large payload, packing and unpacking release the GIL.
"""

import enum
import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.codec import bitshuffle, planes
from kvtier.codec.checksums import MAGIC, checksum, prefix
from kvtier.codec.sealing import MAX_KEY_ID, SEAL_BYTES
from kvtier.errors import CorruptBlockError, InvalidInputError
from kvtier.identity.keys import StoreKey

HEADER_BYTES = 96

_RAW_VERSION = 1
VERSION = 2
"""The version in which a block is written that is packed or sealed."""
_VERSIONS = frozenset({_RAW_VERSION, VERSION})
"""What this release reads."""
_SEALED = 0x01
_FIELDS = struct.Struct("<4sHBB64sQQQ")
"""Magic, version, codec, flags, key, both lengths as version 1 has them, checksum."""
_CHECKSUM = struct.Struct("<Q")
_FORM = struct.Struct("<BQQ")
"""Codec, stored length, checksum."""
_LENGTH_BITS = 32
_LENGTH_MASK = (1 << _LENGTH_BITS) - 1

HEADER_DTYPE = np.dtype(
    [
        ("magic", "<u4"),
        ("version", "<u2"),
        ("codec", "u1"),
        ("flags", "u1"),
        ("key", "V64"),
        ("raw_length", "<u4"),
        ("key_id", "<u4"),
        ("stored_length", "<u4"),
        ("reserved", "<u4"),
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
    """The payload is not packed: raw and stored length are equal."""
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


@dataclass(frozen=True, slots=True)
class Header:
    """A well-formed header. Says nothing yet about the payload: see `verify`."""

    key: StoreKey
    codec: Codec
    raw_length: int
    stored_length: int
    checksum: int
    """Its writer's, of the raw payload; of the payload as stored in a packed block of version 1 and in a sealed one."""
    version: int
    key_id: int = 0
    """The key that the block is sealed with; 0: it is not."""

    @property
    def fingerprint(self) -> int:
        """Another one for each way to store the same payload, so that parts of two of them are not taken for one."""
        if self.codec is Codec.RAW or self.version == _RAW_VERSION or self.key_id:
            return self.checksum
        return int(xxhash.xxh3_64_intdigest(_FORM.pack(self.codec, self.stored_length, self.checksum)))


def encode(key: StoreKey, payload: _Buffer, checksum: int, codec: Codec = Codec.RAW) -> tuple[bytes, _Buffer]:
    """Header and payload as stored, the latter packed by `codec` where that saves at least 3 %.

    Else the block is stored raw, and the second part is `payload` itself, not a copy. `payload` is
    one-dimensional bytes.

    :param checksum: the writer's. It is taken over as it is: when `payload` has changed since, no reader takes it.
    """
    packed = pack(codec, payload)
    if packed is None:
        return header_from_checksum(key, len(payload), checksum), payload
    header = Header(key, codec, len(payload), len(packed) + _CHECKSUM.size, checksum, VERSION)
    head = pack_header(header)
    stored = np.empty(header.stored_length, np.uint8)
    np.copyto(stored[: len(packed)], np.frombuffer(packed, np.uint8))  # releases the GIL
    stored[len(packed) :] = np.frombuffer(_CHECKSUM.pack(_sum(head, packed)), np.uint8)
    return head, stored.data


def decode_into(header: _Buffer, key: StoreKey, stored: _Buffer, into: memoryview) -> None:
    """Fills `into` with the block of `key`, whatever its codec.

    Header, key, lengths and checksum are verified before `into` is touched. What a packed payload says
    of itself is checked too, and the writer's checksum; when it turns out bad only while or after it is
    unpacked, `into` holds anything.

    Raises `CorruptBlockError` with the reason.

    :param stored: the payload as stored, exactly; in memory that nobody writes meanwhile.
    :param into: one-dimensional writable bytes, as many as the block has unpacked.
    """
    parsed = parse_stored_header(header)
    if parsed.raw_length != len(into):
        raise CorruptBlockError(f"block of {parsed.raw_length} bytes instead of {len(into)}")
    verify(parsed, key, stored)
    unpack(parsed, stored, into)


def encode_header(key: StoreKey, payload: _Buffer) -> bytes:
    """The 96 bytes that stand before `payload`, codec raw. `payload` is one-dimensional bytes."""
    return header_from_checksum(key, len(payload), checksum(key, payload))


def header_from_checksum(key: StoreKey, raw_length: int, checksum: int) -> bytes:
    """The header of a raw payload whose `checksum` is known already. Costs no look at the payload."""
    return prefix(key, raw_length) + _CHECKSUM.pack(checksum)


def parse_header(buffer: _Buffer) -> Header:
    """Reads the first 96 bytes of `buffer`, of a raw block: what travels between processes.

    Raises `CorruptBlockError` with the reason when they are fewer, foreign, of a version or codec that
    this release does not know, or of a packed or sealed block.
    """
    header = parse_stored_header(buffer)
    if header.codec is not Codec.RAW:
        raise CorruptBlockError(f"codec {header.codec} ({header.codec.label}) where only raw is taken")
    if header.key_id:
        raise CorruptBlockError(f"sealed with key {header.key_id} where only blocks that are not sealed are taken")
    return header


def parse_stored_header(buffer: _Buffer) -> Header:
    """`parse_header` of any codec, for those who store blocks and hand the payload to `decode_into`."""
    if len(buffer) < HEADER_BYTES:
        raise CorruptBlockError(f"truncated header: {len(buffer)} of {HEADER_BYTES} bytes")
    magic, version, number, flags, key, raw_length, stored_length, checksum = _FIELDS.unpack_from(buffer)
    if magic != MAGIC:
        raise CorruptBlockError(f"no kvtier block: magic {magic!r}")
    if version not in _VERSIONS:
        raise CorruptBlockError(f"unknown version {version}")
    key_id = 0
    if version == VERSION:
        key_id, reserved = raw_length >> _LENGTH_BITS, stored_length >> _LENGTH_BITS
        raw_length, stored_length = raw_length & _LENGTH_MASK, stored_length & _LENGTH_MASK
        if (flags == _SEALED) != (key_id != 0) or key_id > MAX_KEY_ID:
            raise CorruptBlockError(f"flags {flags:#04x} with key {key_id}: sealed, or not")
        if reserved:
            raise CorruptBlockError(f"unknown field {reserved:#010x}")
    if number not in _CODECS:
        raise CorruptBlockError(f"unknown codec {number}")
    if flags and not key_id:
        raise CorruptBlockError(f"unknown flags {flags:#04x}")
    codec = Codec(number)
    around = SEAL_BYTES if key_id else 0
    fewest = around or (_CHECKSUM.size if version == VERSION else 0)
    most = raw_length + around
    if (stored_length != most) if codec is Codec.RAW else not fewest <= stored_length < most:
        raise CorruptBlockError(f"{codec.label} codec with lengths {raw_length} and {stored_length}")
    return Header(StoreKey(key), codec, raw_length, stored_length, checksum, version, key_id)


def well_formed(headers: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    """Which of an array of `HEADER_DTYPE` `parse_stored_header` would take."""
    magic = headers["magic"] == int.from_bytes(MAGIC, "little")
    stored, codec, is_new = headers["stored_length"], headers["codec"], headers["version"] == VERSION
    is_sealed = is_new & (headers["flags"] == _SEALED) & (headers["key_id"] - np.uint32(1) < MAX_KEY_ID)
    most = headers["raw_length"].astype(np.int64) + SEAL_BYTES * is_sealed
    fewest = np.where(is_sealed, SEAL_BYTES, _CHECKSUM.size * is_new)
    lengths = np.where(codec == Codec.RAW, stored == most, (stored < most) & (stored >= fewest))
    known = np.isin(codec, list(_CODECS)) & np.isin(headers["version"], list(_VERSIONS))
    plain = (headers["flags"] == 0) & (headers["key_id"] == 0)
    good: npt.NDArray[np.bool_] = magic & known & (plain | is_sealed) & (headers["reserved"] == 0) & lengths
    return good


def sealed(headers: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    """Which of an array of well-formed headers are of sealed blocks."""
    flagged: npt.NDArray[np.bool_] = headers["flags"] == _SEALED
    return flagged


def verify(header: Header, key: StoreKey, stored: _Buffer) -> None:
    """Passes when `stored` is, byte for byte, what was stored under `key`; else raises `CorruptBlockError`.

    A packed block of version 2 that passes may still differ from what its writer had: `unpack` finds that out.
    A sealed block that passes was not changed by accident; who wrote it nobody knows before it is opened.

    :param key: the key that was asked for, so that a block in another's place is found out.
    :param stored: the payload as stored, packed or not.
    """
    if header.key != key:
        raise CorruptBlockError("block of another key")
    if len(stored) != header.stored_length:
        raise CorruptBlockError(f"truncated payload: {len(stored)} of {header.stored_length} bytes")
    if header.key_id or (header.version == _RAW_VERSION and header.codec is not Codec.RAW):
        is_whole = sum_stored(pack_header(header), stored) == header.checksum
    elif header.codec is Codec.RAW:
        is_whole = checksum(key, stored) == header.checksum
    else:
        packed, (expected,) = _packed(header, stored), _CHECKSUM.unpack(stored[-_CHECKSUM.size :])
        is_whole = _sum(pack_header(header), packed) == expected
    if not is_whole:
        raise CorruptBlockError("checksum mismatch")


def unpack(header: Header, stored: _Buffer, into: memoryview) -> None:
    """The last step of `decode_into`, for a payload that `verify` has passed and an `into` of its raw length.

    Raises `CorruptBlockError` when it cannot be unpacked, is sealed, or is not what its writer has summed.
    """
    if header.key_id:
        raise CorruptBlockError(f"sealed with key {header.key_id}, where there are no keys")
    unpack_as(header.codec, _packed(header, stored), into)
    is_packed = header.codec is not Codec.RAW
    if is_packed and header.version != _RAW_VERSION and checksum(header.key, into) != header.checksum:
        raise CorruptBlockError("checksum mismatch once unpacked: its bytes changed before they were packed")


def decode(header: _Buffer, key: StoreKey, payload: _Buffer) -> Header:
    """`parse_header` and `verify` in one step: for raw blocks."""
    parsed = parse_header(header)
    verify(parsed, key, payload)
    return parsed


def pack(codec: Codec, payload: _Buffer) -> _Buffer | None:
    """The payload as packed by `codec`. None where that cannot be, or saves less than 3 %."""
    packed: _Buffer | None = None
    if codec is Codec.LZ4:
        packed = bitshuffle.pack(payload)
    elif codec is Codec.PLANES_ZSTD:
        packed = planes.pack(payload)
    if packed is None or len(packed) + _CHECKSUM.size > _WORTH_PACKING * len(payload):
        return None
    return packed


def unpack_as(codec: Codec, packed: _Buffer, into: memoryview) -> None:
    """Fills `into` with what `codec` has packed; for `RAW` a copy. Raises `CorruptBlockError` when that cannot be."""
    if codec is Codec.LZ4:
        bitshuffle.unpack_into(packed, into)
    elif codec is Codec.PLANES_ZSTD:
        planes.unpack_into(packed, into)
    elif into:  # numpy refuses empty buffers
        np.copyto(np.frombuffer(into, dtype=np.uint8), np.frombuffer(packed, dtype=np.uint8))  # releases the GIL


def pack_header(header: Header) -> bytes:
    """The 96 bytes of `header`; the lengths of what needs a version 2 are below 2^32."""
    return _FIELDS.pack(
        MAGIC,
        header.version,
        header.codec,
        _SEALED if header.key_id else 0,
        header.key,
        header.raw_length | header.key_id << _LENGTH_BITS,
        header.stored_length,
        header.checksum,
    )


def sum_stored(head: bytes, stored: _Buffer) -> int:
    """The checksum in the header of a sealed block: of `head` without its own checksum, and the payload as stored."""
    return _sum(head[: HEADER_BYTES - _CHECKSUM.size], stored)


def _packed(header: Header, stored: _Buffer) -> _Buffer:
    """The payload as its codec made it: in version 2, where it is packed, without the checksum behind it."""
    if header.version == _RAW_VERSION or header.codec is Codec.RAW:
        return stored
    return memoryview(stored)[: -_CHECKSUM.size]


def _sum(before: bytes, stored: _Buffer) -> int:
    hasher = xxhash.xxh3_64(before)
    hasher.update(stored)
    return int(hasher.intdigest())
