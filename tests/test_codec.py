import struct

import hypothesis.strategies as st
import pytest
import xxhash
from hypothesis import given

from kvtier.codec import (
    HEADER_BYTES,
    Codec,
    checksum,
    decode,
    encode_header,
    header_from_checksum,
    parse_header,
    verify,
)
from kvtier.errors import CorruptBlockError, InvalidInputError
from kvtier.keys import StoreKey

KEY = StoreKey(bytes(range(64)))
OTHER_KEY = StoreKey(bytes(range(1, 65)))
payloads = st.binary(max_size=300)
keys = st.binary(min_size=64, max_size=64).map(StoreKey)

GOLDEN = [
    (
        bytes(64),
        b"",
        "4b5654420100000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
        "000000000000000000000000000000000000000000000000000000000000000000000000000000003c9b1ad67038f35a",
    ),
    (
        bytes(range(64)),
        b"hello, block",
        "4b56544201000000000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f2021222324252627"
        "28292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f0c000000000000000c0000000000000086f2135e566fa39f",
    ),
    (
        bytes(reversed(range(64))),
        bytes(1000),
        "4b565442010000003f3e3d3c3b3a393837363534333231302f2e2d2c2b2a292827262524232221201f1e1d1c1b1a1918"
        "17161514131211100f0e0d0c0b0a09080706050403020100e803000000000000e8030000000000006475a1ddb57bd3c4",
    ),
]


def build_independently(key: bytes, payload: bytes) -> bytes:
    """The header by the table in the documentation, field by field."""
    fields = [b"KVTB", struct.pack("<H", 1), b"\0", b"\0", key[:16], key[16:32], key[32:]]
    fields += [struct.pack("<Q", len(payload)), struct.pack("<Q", len(payload))]
    head = b"".join(fields)
    return head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head + payload))


@pytest.mark.parametrize(("key", "payload", "golden"), GOLDEN)
def test_golden_vectors(key: bytes, payload: bytes, golden: str) -> None:
    assert encode_header(StoreKey(key), payload).hex() == golden


@given(keys, payloads)
def test_header_is_what_the_table_says(key: StoreKey, payload: bytes) -> None:
    header = encode_header(key, payload)
    assert header == build_independently(key, payload)
    assert header_from_checksum(key, len(payload), checksum(key, payload)) == header
    parsed = decode(header, key, payload)
    assert (parsed.key, parsed.codec, parsed.raw_length, parsed.stored_length) == (
        key,
        Codec.RAW,
        len(payload),
        len(payload),
    )


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview])
def test_any_buffer_will_do(wrap: type) -> None:
    payload = b"payload"
    header = encode_header(KEY, wrap(payload))
    decode(wrap(header), KEY, wrap(payload))


@given(st.data(), st.binary(min_size=1, max_size=200))
def test_any_flipped_bit_is_detected(data: st.DataObject, payload: bytes) -> None:
    stored = bytearray(encode_header(KEY, payload) + payload)
    bit = data.draw(st.integers(min_value=0, max_value=8 * len(stored) - 1))
    stored[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptBlockError):
        decode(stored[:HEADER_BYTES], KEY, bytes(stored[HEADER_BYTES:]))


def test_every_bit_of_the_header_counts() -> None:
    header = encode_header(KEY, b"payload")
    for bit in range(8 * HEADER_BYTES):
        flipped = bytearray(header)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptBlockError):
            decode(flipped, KEY, b"payload")


@given(st.data(), st.binary(min_size=1, max_size=200))
def test_truncation_is_detected(data: st.DataObject, payload: bytes) -> None:
    stored = encode_header(KEY, payload) + payload
    cut = stored[: data.draw(st.integers(min_value=0, max_value=len(stored) - 1))]
    with pytest.raises(CorruptBlockError, match="truncated"):
        decode(cut[:HEADER_BYTES], KEY, cut[HEADER_BYTES:])


def test_a_longer_payload_is_detected() -> None:
    with pytest.raises(CorruptBlockError):
        decode(encode_header(KEY, b"abc"), KEY, b"abc\0")


def test_swapped_blocks_are_detected() -> None:
    mine, theirs = encode_header(KEY, b"mine"), encode_header(OTHER_KEY, b"them")
    with pytest.raises(CorruptBlockError, match="another key"):
        decode(theirs, KEY, b"them")
    with pytest.raises(CorruptBlockError, match="checksum"):
        decode(mine, KEY, b"them")


@pytest.mark.parametrize(
    ("offset", "patch", "reason"),
    [
        (0, b"KVTC", "magic"),
        (4, b"\x02\x00", "version 2"),
        (6, b"\x01", "codec 1"),
        (7, b"\x80", "flags 0x80"),
        (72, b"\x00", "lengths 0 and 7"),
    ],
)
def test_what_this_release_does_not_know_is_refused_with_the_reason(offset: int, patch: bytes, reason: str) -> None:
    header = bytearray(encode_header(KEY, b"payload"))
    header[offset : offset + len(patch)] = patch
    with pytest.raises(CorruptBlockError, match=reason):
        parse_header(header)


def test_parsing_alone_does_not_vouch_for_the_payload() -> None:
    header = parse_header(encode_header(KEY, b"payload"))
    with pytest.raises(CorruptBlockError, match="checksum"):
        verify(header, KEY, b"PAYLOAD")


@pytest.mark.parametrize("length", [0, 63, 65])
def test_a_key_of_the_wrong_length_is_the_callers_bug(length: int) -> None:
    with pytest.raises(InvalidInputError, match="64"):
        encode_header(StoreKey(bytes(length)), b"payload")
