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
any thread; hashing a large payload releases the GIL (2 MiB: about 65 us).

The checksum finds accidents, not attackers: xxh3 has no key.
"""

import enum
import struct
from dataclasses import dataclass

import xxhash

from kvtier.errors import CorruptBlockError, InvalidInputError
from kvtier.keys import STORE_KEY_BYTES, StoreKey

HEADER_BYTES = 96
VERSION = 1

_MAGIC = b"KVTB"
_CHECKED_BYTES = HEADER_BYTES - 8
_FIELDS = struct.Struct("<4sHBB64sQQ")
_CHECKSUM = struct.Struct("<Q")

_Buffer = bytes | bytearray | memoryview


class Codec(enum.IntEnum):
    """How the payload is packed."""

    RAW = 0
    """Not at all: raw and stored length are equal."""


@dataclass(frozen=True, slots=True)
class Header:
    """A well-formed header. Says nothing yet about the payload: see `verify`."""

    key: StoreKey
    codec: Codec
    raw_length: int
    stored_length: int
    checksum: int


def checksum(key: StoreKey, payload: _Buffer) -> int:
    """xxh3_64 of the stored form of `payload` under `key`, for a holder who keeps it apart from the bytes."""
    hasher = xxhash.xxh3_64(_prefix(key, len(payload)))
    hasher.update(payload)
    return int(hasher.intdigest())


def encode_header(key: StoreKey, payload: _Buffer) -> bytes:
    """The 96 bytes that stand before `payload`, codec raw. `payload` is one-dimensional bytes."""
    return header_from_checksum(key, len(payload), checksum(key, payload))


def header_from_checksum(key: StoreKey, raw_length: int, checksum: int) -> bytes:
    """The header of a raw payload whose `checksum` is known already. Costs no look at the payload."""
    return _prefix(key, raw_length) + _CHECKSUM.pack(checksum)


def parse_header(buffer: _Buffer) -> Header:
    """Reads the first 96 bytes of `buffer`.

    Raises `CorruptBlockError` with the reason when they are fewer, foreign, or of a version or codec
    that this release does not know.
    """
    if len(buffer) < HEADER_BYTES:
        raise CorruptBlockError(f"truncated header: {len(buffer)} of {HEADER_BYTES} bytes")
    magic, version, codec, flags, key, raw_length, stored_length = _FIELDS.unpack_from(buffer)
    if magic != _MAGIC:
        raise CorruptBlockError(f"no kvtier block: magic {magic!r}")
    if version != VERSION:
        raise CorruptBlockError(f"unknown version {version}")
    if codec != Codec.RAW:
        raise CorruptBlockError(f"unknown codec {codec}")
    if flags:
        raise CorruptBlockError(f"unknown flags {flags:#04x}")
    if raw_length != stored_length:
        raise CorruptBlockError(f"raw codec with lengths {raw_length} and {stored_length}")
    (stored_checksum,) = _CHECKSUM.unpack_from(buffer, _CHECKED_BYTES)
    return Header(StoreKey(key), Codec(codec), raw_length, stored_length, stored_checksum)


def verify(header: Header, key: StoreKey, payload: _Buffer) -> None:
    """Passes when `payload` is, byte for byte, what was stored under `key`; else raises `CorruptBlockError`.

    :param key: the key that was asked for, so that a block in another's place is found out.
    """
    if header.key != key:
        raise CorruptBlockError("block of another key")
    if len(payload) != header.stored_length:
        raise CorruptBlockError(f"truncated payload: {len(payload)} of {header.stored_length} bytes")
    if checksum(key, payload) != header.checksum:
        raise CorruptBlockError("checksum mismatch")


def decode(header: _Buffer, key: StoreKey, payload: _Buffer) -> Header:
    """`parse_header` and `verify` in one step."""
    parsed = parse_header(header)
    verify(parsed, key, payload)
    return parsed


def _prefix(key: StoreKey, length: int) -> bytes:
    """Bytes 0 to 87 for a raw payload of `length` bytes."""
    if len(key) != STORE_KEY_BYTES:  # struct would pad or cut it without a word
        raise InvalidInputError(f"store key of {len(key)} bytes: needs {STORE_KEY_BYTES}")
    return _FIELDS.pack(_MAGIC, VERSION, Codec.RAW, 0, key, length, length)
