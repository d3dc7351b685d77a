"""The stored form: every field and every bit of it counts, and what was encoded is decoded."""

import random
import struct
from concurrent.futures import ThreadPoolExecutor

import hypothesis.strategies as st
import pytest
import xxhash
from hypothesis import given

from codec_rig import GOLDEN_PAYLOAD, KEY, PACKING, like_bf16, load
from kvtier.codec.checksums import checksum
from kvtier.codec.stored_form import (
    HEADER_BYTES,
    Codec,
    decode,
    decode_into,
    encode,
    encode_header,
    header_from_checksum,
    parse_header,
    parse_stored_header,
    verify,
)
from kvtier.errors import CorruptBlockError, InvalidInputError
from kvtier.identity.keys import StoreKey
from kvtier.testing.blocks import summed

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
        (4, b"\x03\x00", "version 3"),
        (6, b"\x03", "codec 3"),
        (7, b"\x80", "flags 0x80"),
        (72, b"\x00", "lengths 0 and 7"),
        (6, b"\x01", "lengths 7 and 7"),
        (6, b"\x02", "lengths 7 and 7"),
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


PACKED_GOLDENS = [
    (
        "4b56544201000100000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f2021222324252627"
        "28292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f0002000000000000a400000000000000b4dc8a3fc0ace651"
        "020124020002000000020000a4000000140000005f0000001f5501000c1fcc01000c1fc301000c2f956a02000b4fe68c"
        "19730400098f525a4b29ada5b4d6080005fc0164936db2c936d9649b6c924d36c9269b1000f011d2b624695b92b42d49"
        "dab6246d5b92b62d49db96a46d4bd2b62549db92a46d49290000001300010013ff0100030f0013000f00051000040200"
        "0418000f0200750498000f020020500000000000"
    ),
    (
        "4b56544201000200000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f2021222324252627"
        "28292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f00020000000000003001000000000000d21eed0df5d22308"
        "02019001000100000001000030000000140000001800000028b52ffd600000750000283c3c3d3e3f04140027141ed9da"
        "0db45b02a950f79e45ec933ae1882fd67d24cb7219c0670eb55c03aa51f89f46ed943be28930d77e25cc731ac1680fb6"
        "5d04ab52f9a047ee953ce38a31d87f26cd741bc26910b75e05ac53faa148ef963de48b32d98027ce751cc36a11b85f06"
        "ad54fba249f0973ee58c33da8128cf761dc46b12b96007ae55fca34af1983fe68d34db8229d0771ec56c13ba6108af56"
        "fda44bf29940e78e35dc832ad1781fc66d14bb6209b057fea54cf39a41e88f36dd842bd27920c76e15bc630ab158ffa6"
        "4df49b42e99037de852cd37a21c86f16bd640bb25900a74ef59c43ea9138df862dd47b22c97017be650cb35a01a84ff6"
        "9d44eb9239e0872ed57c23ca7118bf66"
    ),
]
"""Stored blocks of version 1. Nobody writes such any more; every release reads them."""


@pytest.mark.parametrize(("golden", "codec"), list(zip(PACKED_GOLDENS, PACKING, strict=True)))
def test_a_packed_block_of_an_earlier_release_is_read(golden: str, codec: Codec) -> None:
    stored = bytes.fromhex(golden)
    assert parse_stored_header(stored).codec is codec
    assert load(stored[:HEADER_BYTES], StoreKey(bytes(range(64))), stored[HEADER_BYTES:], 512) == GOLDEN_PAYLOAD


@given(keys, st.one_of(payloads, st.integers(min_value=0, max_value=3000).map(like_bf16)), st.sampled_from(Codec))
def test_what_was_encoded_is_decoded(key: StoreKey, payload: bytes, codec: Codec) -> None:
    header, stored = encode(*summed(key, payload), codec)
    parsed = parse_stored_header(header)
    assert (parsed.key, parsed.raw_length, parsed.stored_length) == (key, len(payload), len(stored))
    assert load(header, key, bytes(stored), len(payload)) == payload


@pytest.mark.parametrize("codec", PACKING)
def test_packing_pays_or_is_left_alone(codec: Codec) -> None:
    payload = like_bf16(4096)
    header, stored = encode(*summed(KEY, payload), codec)
    assert parse_stored_header(header).codec is codec
    assert len(stored) < 0.8 * len(payload)
    for untouched in (random.Random(0).randbytes(8192), random.Random(0).randbytes(3), b""):
        header, stored = encode(*summed(KEY, untouched), codec)
        assert stored is untouched, "not even a copy"
        assert header == encode_header(KEY, untouched)


def test_raw_is_left_alone() -> None:
    for untouched, codec in ((like_bf16(4096), Codec.RAW), (like_bf16(4096) + b"!", Codec.PLANES_ZSTD)):
        header, stored = encode(*summed(KEY, untouched), codec)
        assert stored is untouched, "not even a copy"
        assert header == encode_header(KEY, untouched)


@pytest.mark.parametrize("codec", PACKING)
@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview])
def test_packing_takes_any_buffer(wrap: type, codec: Codec) -> None:
    payload = like_bf16(1001)
    header, stored = encode(*summed(KEY, wrap(payload)), codec)
    assert parse_stored_header(header).codec is codec
    assert load(wrap(header), KEY, wrap(bytes(stored)), len(payload)) == payload


@pytest.mark.parametrize("codec", PACKING)
def test_those_who_take_raw_blocks_only_refuse_packed_ones(codec: Codec) -> None:
    header, stored = encode(*summed(KEY, like_bf16(1000)), codec)
    with pytest.raises(CorruptBlockError, match="only raw"):
        parse_header(header)
    with pytest.raises(CorruptBlockError, match="only raw"):
        decode(header, KEY, bytes(stored))


@given(st.data(), st.sampled_from(PACKING))
def test_any_flipped_bit_of_a_packed_block_is_detected_before_it_is_unpacked(data: st.DataObject, codec: Codec) -> None:
    payload = like_bf16(300)
    header, packed = encode(*summed(KEY, payload), codec)
    stored = bytearray(header + bytes(packed))
    bit = data.draw(st.integers(min_value=0, max_value=8 * len(stored) - 1))
    stored[bit // 8] ^= 1 << bit % 8
    into = bytearray(len(payload))
    with pytest.raises(CorruptBlockError):
        decode_into(stored[:HEADER_BYTES], KEY, stored[HEADER_BYTES:], memoryview(into))
    assert not any(into)


def test_a_block_of_another_key_or_length_leaves_the_buffer_alone() -> None:
    payload = like_bf16(300)
    for codec in Codec:
        header, stored = encode(*summed(KEY, payload), codec)
        for key, nbytes, reason in ((OTHER_KEY, 600, "another key"), (KEY, 599, "600"), (KEY, 601, "600")):
            into = bytearray(nbytes)
            with pytest.raises(CorruptBlockError, match=reason):
                decode_into(header, key, stored, memoryview(into))
            assert not any(into)


def test_packing_and_unpacking_in_many_threads_at_once() -> None:
    """Codecs mixed: they have one library, and its settings, in common."""
    blocks = [like_bf16(5000 + i) for i in range(32)]

    def there_and_back(payload: bytes) -> bytes:
        header, stored = encode(*summed(KEY, payload), PACKING[len(payload) // 2 % 2])
        return load(header, KEY, bytes(stored), len(payload))

    with ThreadPoolExecutor(4) as executor:
        assert list(executor.map(there_and_back, blocks * 4)) == blocks * 4


def test_codecs_by_name() -> None:
    assert [Codec.parse(name) for name in ("raw", "lz4", "planes-zstd")] == list(Codec)
    for unknown in ("zstd", "planes_zstd", "RAW"):
        with pytest.raises(InvalidInputError, match="raw, lz4, planes-zstd"):
            Codec.parse(unknown)
