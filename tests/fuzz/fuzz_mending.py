"""Makes checksums and lengths of mutated bytes right again, so that what lies behind them is fuzzed too.

What is computed here follows `docs/stored-form.md` and `docs/block-protocol.md`, not kvtier's own code.
"""

import struct
from collections.abc import Iterator

import msgpack
import xxhash

from kvtier.codec.checksums import checksum
from kvtier.identity.keys import StoreKey

HEADER_BYTES = 96
_SUMMED = 88
_SEALED = 1
_MAGIC = b"KVTF"
_PRELUDE = struct.Struct("<4sIQ")


def mended_block(block: bytes, key: StoreKey) -> bytes:
    """A block in its stored form with the key, its length, and the checksum that its version and codec ask for.

    A packed block of version 2 keeps its writer's checksum.
    """
    head, stored = bytearray(block[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0")), bytearray(block[HEADER_BYTES:])
    version, codec, flags = struct.unpack_from("<HBB", head, 4)
    head[8:72] = key
    struct.pack_into("<I", head, 80, len(stored))
    if codec == 0 and flags != _SEALED:
        struct.pack_into("<I", head, 72, len(stored))
        struct.pack_into("<Q", head, _SUMMED, checksum(key, bytes(stored)))
    elif version == 1 or flags == _SEALED:
        struct.pack_into("<Q", head, _SUMMED, xxhash.xxh3_64_intdigest(bytes(head[:_SUMMED] + stored)))
    else:
        stored[-8:] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(head + stored[:-8])))
    return bytes(head + stored)


def mended_frames(data: bytes) -> bytes:
    """Frames of the block protocol whose lengths are right, and whose blocks have the right checksums."""
    return b"".join(_PRELUDE.pack(_MAGIC, len(head), len(rest)) + head + rest for head, rest in _frames(data))


def _frames(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    for piece in data.split(_MAGIC)[1:]:
        body = piece[_PRELUDE.size - len(_MAGIC) :]
        unpacker = msgpack.Unpacker(raw=False, strict_map_key=False, max_buffer_size=1 << 20)
        unpacker.feed(body)
        try:
            fields = unpacker.unpack()
        except Exception:  # of many kinds; it is no header, then, whatever it is
            yield body, b""
            continue
        end = unpacker.tell()
        payload = body[end:]
        if isinstance(fields, dict) and isinstance(fields.get("headers"), bytes):
            fields["headers"], payload = mended_headers(fields["headers"], payload)
            yield msgpack.packb(fields), payload
        else:
            yield body[:end], payload


def mended_headers(headers: bytes, payload: bytes) -> tuple[bytes, bytes]:
    """Headers of raw blocks, one after the other, with the checksums of what they say lies in `payload`.

    The payload is cut to them. Keys stay what they are.
    """
    out = []
    start = 0
    for at in range(0, len(headers) - HEADER_BYTES + 1, HEADER_BYTES):
        head = headers[at : at + HEADER_BYTES]
        (nbytes,) = struct.unpack_from("<Q", head, 72)
        stored = payload[start : start + nbytes]
        out.append(mended_block(head + stored, StoreKey(head[8:72]))[:HEADER_BYTES])
        start += len(stored)
    return b"".join(out) + headers[len(out) * HEADER_BYTES :], payload[:start]
