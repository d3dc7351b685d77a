"""kvtier's own traces as a file: records in msgpack, in LZ4 frames one after the other.

The first record is a map that says what was recorded: `format`, `version`, `source`, `policy`, and `capacity_blocks` or
`capacity_bytes` of the cache that was there. Each further one is a list
`[kind, ms since the first record, tenant, payload bytes of each block, keys]`. `tenant` and each 8 bytes of `keys` are
BLAKE2b with a secret that was made for the file and is not in it: equal keys are equal inside a file, and nowhere else.
A recording that was cut off ends in a torn frame, which readers pass over.
"""

import enum
import hashlib
import secrets
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import lz4.frame
import msgpack
import numpy as np

from kvtier.errors import ConfigError

FRAME_MAGIC = b"\x04\x22\x4d\x18"
FORMAT = "kvtier-trace"
VERSION = 1
_DIGEST_BYTES = 8
_MAX_RECORD_BYTES = 1 << 26
_READ_BYTES = 1 << 16
_PIECE_BYTES = 1 << 20


class Kind(enum.IntEnum):
    """What was done with blocks."""

    LOOKUP = 0
    """Somebody asked whether they are there."""
    READ = 1
    WRITE = 2
    """They were added, each of so many bytes."""
    DROPPED = 3
    """The number of keys that were not recorded, in place of `payload bytes`."""


class Record(NamedTuple):
    kind: Kind
    time_s: float
    tenant: bytes
    nbytes: int
    """Payload of each block; 0 where it is unknown."""
    keys: list[int]


class Disguise:
    """Turns keys into others that tell nothing of them. One for a file; any thread. 0.7 us a key."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def __call__(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, digest_size=_DIGEST_BYTES, key=self._secret).digest()

    def record(self, kind: Kind, time_s: float, tenant: bytes, nbytes: int, keys: Iterable[bytes]) -> bytes:
        """The record as it stands in the file."""
        hidden = b"".join(map(self, keys))
        return bytes(msgpack.packb([int(kind), round(time_s * 1e3), self(tenant), nbytes, hidden]))


def dropped(num_keys: int) -> bytes:
    """A record that says that keys are missing."""
    return bytes(msgpack.packb([int(Kind.DROPPED), 0, b"", num_keys, b""]))


def header(fields: Mapping[str, str | int]) -> bytes:
    """The first record: `fields`, and what it is."""
    return bytes(msgpack.packb({"format": FORMAT, "version": VERSION, **fields}))


def frame(records: bytes) -> bytes:
    """A frame that can be read by itself."""
    return bytes(lz4.frame.compress(records))


def read_records(path: Path) -> tuple[dict[str, Any], Iterator[Record]]:
    """The header, and the records as they are read. Raises `ConfigError` for another file, also later.

    What comes after a frame that was cut off is not there: the records end before it.
    """
    unpacked = _unpacked(path)
    head = next(unpacked, None)
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise ConfigError(f"{path} is no trace: name one that a pool or an engine recorded")
    if head.get("version") != VERSION:
        raise ConfigError(
            f"{path} is a trace of version {head.get('version')}, and this kvtier reads version {VERSION}: "
            "use the kvtier that recorded it"
        )
    return head, (_record(path, fields) for fields in unpacked)


def _unpacked(path: Path) -> Iterator[Any]:
    unpacker = msgpack.Unpacker(max_buffer_size=_MAX_RECORD_BYTES, raw=False)
    try:
        with path.open("rb") as file:
            for data in _decompressed(file):
                unpacker.feed(data)
                yield from unpacker
    except (OSError, RuntimeError, ValueError, msgpack.UnpackException) as error:
        raise ConfigError(f"{path} is damaged and cannot be read: {error}; copy or record it anew") from error


def _decompressed(file: IO[bytes]) -> Iterator[bytes]:
    """What the frames hold, piece by piece, and as much of a torn frame as can be had."""
    decompressor = lz4.frame.LZ4FrameDecompressor()
    data = b""
    while True:
        if not data and decompressor.needs_input:
            data = file.read(_READ_BYTES)
            if not data:
                return
        yield decompressor.decompress(data, max_length=_PIECE_BYTES)
        data = b""
        if decompressor.eof:
            data = decompressor.unused_data or b""
            decompressor = lz4.frame.LZ4FrameDecompressor()


def _record(path: Path, fields: Any) -> Record:
    try:
        kind, time_ms, tenant, nbytes, keys = fields
        if not (isinstance(tenant, bytes) and isinstance(nbytes, int) and isinstance(time_ms, int)):
            raise TypeError("tenants are bytes, times and sizes are whole numbers")
        return Record(Kind(kind), time_ms / 1e3, tenant, nbytes, np.frombuffer(keys, "<u8").tolist())
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{path} is damaged: {fields!r:.80} is no record; copy or record it anew") from error
