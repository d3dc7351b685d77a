"""Payloads that pack, and blocks with headers that are right, whatever stands behind them."""

import struct

import xxhash

from kvtier.codec import bitshuffle, planes
from kvtier.codec.stored_form import Codec, decode_into
from kvtier.identity.keys import StoreKey

KEY = StoreKey(bytes(range(64)))
PACKING = [Codec.LZ4, Codec.PLANES_ZSTD]
GOLDEN_PAYLOAD = bytes(b for i in range(256) for b in (i * 167 + 13 & 255, 0x3C | i >> 6))
"""What the packed blocks among the golden vectors hold."""


def like_bf16(num_values: int) -> bytes:
    """Noise in the low bytes, few values in the high ones: as KV has it."""
    return b"".join(bytes(((i * 167 + i * i * 31 + 13) & 255, 0x3C | i >> 6 & 3)) for i in range(num_values))


def load(header: bytes, key: StoreKey, stored: bytes, nbytes: int) -> bytes:
    into = bytearray(b"\xa5" * nbytes)
    decode_into(header, key, stored, memoryview(into))
    return bytes(into)


def signed(key: StoreKey, raw_length: int, stored: bytes, codec: Codec = Codec.LZ4) -> bytes:
    """A header of version 1 whose checksum is right, whatever stands behind it: an attacker's."""
    fields = b"KVTB" + struct.pack("<HBB", 1, codec, 0) + key + struct.pack("<QQ", raw_length, len(stored))
    return fields + struct.pack("<Q", xxhash.xxh3_64_intdigest(fields + stored))


def build_v1(key: StoreKey, payload: bytes, codec: Codec) -> tuple[bytes, bytes]:
    """A packed block as releases wrote it that knew version 1 only."""
    packed = {Codec.RAW: bytes, Codec.LZ4: bitshuffle.pack, Codec.PLANES_ZSTD: planes.pack}[codec](payload)
    assert packed is not None
    return signed(key, len(payload), bytes(packed), codec), bytes(packed)
