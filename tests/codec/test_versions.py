"""Versions of the stored form: 2 says what a writer had before it was packed, 1 is read as ever, others are refused."""

import struct

import numpy as np
import pytest
import xxhash

from codec_rig import GOLDEN_PAYLOAD, KEY, PACKING, build_v1, like_bf16, load
from kvtier.codec import stored_form
from kvtier.codec.checksums import checksum
from kvtier.codec.stored_form import (
    HEADER_BYTES,
    HEADER_DTYPE,
    Codec,
    decode_into,
    encode,
    encode_header,
    parse_header,
    parse_stored_header,
    verify,
    well_formed,
)
from kvtier.errors import CorruptBlockError
from kvtier.identity.keys import StoreKey
from kvtier.testing.blocks import summed

PAYLOAD = like_bf16(4096)
GOLDENS = [
    "4b56544202000100000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f2021222324252627"
    "28292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f0002000000000000ac00000000000000107d97c814b029e4"
    "020124020002000000020000a4000000140000005f0000001f5501000c1fcc01000c1fc301000c2f956a02000b4fe68c"
    "19730400098f525a4b29ada5b4d6080005fc0164936db2c936d9649b6c924d36c9269b1000f011d2b624695b92b42d49"
    "dab6246d5b92b62d49db96a46d4bd2b62549db92a46d49290000001300010013ff0100030f0013000f00051000040200"
    "0418000f0200750498000f020020500000000000799447d16f7fc315",
    "4b56544202000200000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f2021222324252627"
    "28292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f00020000000000003801000000000000107d97c814b029e4"
    "02019001000100000001000030000000140000001800000028b52ffd600000750000283c3c3d3e3f04140027141ed9da"
    "0db45b02a950f79e45ec933ae1882fd67d24cb7219c0670eb55c03aa51f89f46ed943be28930d77e25cc731ac1680fb6"
    "5d04ab52f9a047ee953ce38a31d87f26cd741bc26910b75e05ac53faa148ef963de48b32d98027ce751cc36a11b85f06"
    "ad54fba249f0973ee58c33da8128cf761dc46b12b96007ae55fca34af1983fe68d34db8229d0771ec56c13ba6108af56"
    "fda44bf29940e78e35dc832ad1781fc66d14bb6209b057fea54cf39a41e88f36dd842bd27920c76e15bc630ab158ffa6"
    "4df49b42e99037de852cd37a21c86f16bd640bb25900a74ef59c43ea9138df862dd47b22c97017be650cb35a01a84ff6"
    "9d44eb9239e0872ed57c23ca7118bf6640eead8e2d2fa95e",
]
"""Packed blocks of version 2. Another release of a library may pack otherwise; none may read these otherwise."""


@pytest.mark.parametrize(("golden", "codec"), list(zip(GOLDENS, PACKING, strict=True)))
def test_golden_vectors(golden: str, codec: Codec) -> None:
    stored = bytes.fromhex(golden)
    header = parse_stored_header(stored)
    assert (header.version, header.codec) == (2, codec)
    assert load(stored[:HEADER_BYTES], KEY, stored[HEADER_BYTES:], 512) == GOLDEN_PAYLOAD
    assert header.checksum == parse_header(encode_header(KEY, GOLDEN_PAYLOAD)).checksum, "as if it were raw"


@pytest.mark.parametrize("codec", PACKING)
def test_a_packed_block_is_what_the_table_says(codec: Codec) -> None:
    header, stored = encode(*summed(KEY, PAYLOAD), codec)
    packed = bytes(stored[:-8])
    lengths = struct.pack("<IIII", len(PAYLOAD), 0, len(packed) + 8, 0)
    expected = b"KVTB" + struct.pack("<HBB", 2, codec, 0) + KEY + lengths + struct.pack("<Q", checksum(KEY, PAYLOAD))
    assert header == expected
    assert stored[-8:] == struct.pack("<Q", xxhash.xxh3_64_intdigest(expected + packed))


@pytest.mark.parametrize("codec", list(Codec))
def test_bytes_that_changed_after_they_were_summed_are_never_read(codec: Codec) -> None:
    key, payload, checksum = summed(KEY, bytearray(PAYLOAD))
    payload[5000] ^= 1
    header, stored = encode(key, payload, checksum, codec)
    into = memoryview(bytearray(len(payload)))
    with pytest.raises(CorruptBlockError, match="checksum mismatch"):
        decode_into(header, key, stored, into)


@pytest.mark.parametrize("codec", PACKING)
def test_version_1_is_read_as_ever(codec: Codec) -> None:
    header, stored = build_v1(KEY, PAYLOAD, codec)
    assert parse_stored_header(header).version == 1
    assert load(header, KEY, stored, len(PAYLOAD)) == PAYLOAD
    damaged = bytearray(stored)
    damaged[100] ^= 1
    with pytest.raises(CorruptBlockError, match="checksum"):
        load(header, KEY, bytes(damaged), len(PAYLOAD))


def test_a_raw_block_of_version_2_is_read() -> None:
    """Nobody writes it: raw blocks are the same to every release."""
    header = bytearray(encode_header(KEY, PAYLOAD))
    header[4] = 2
    assert load(bytes(header), KEY, PAYLOAD, len(PAYLOAD)) == PAYLOAD


@pytest.mark.parametrize(
    ("offset", "patch", "reason"),
    [
        (4, b"\x03", "unknown version 3"),
        (7, b"\x01", "flags 0x01 with key 0"),
        (76, b"\x07", "flags 0x00 with key 7"),
        (7, b"\x02", "unknown flags 0x02"),
        (84, b"\x01", "unknown field"),
        (80, b"\x07\x00\x00", "lengths 8192 and 7"),
        (80, b"\xff\xff\xff", "lengths"),
    ],
)
def test_what_this_release_does_not_know_of_version_2_is_refused(offset: int, patch: bytes, reason: str) -> None:
    header = bytearray(encode(*summed(KEY, PAYLOAD), Codec.LZ4)[0])
    assert well_formed(np.frombuffer(bytes(header), HEADER_DTYPE)).all()
    header[offset : offset + len(patch)] = patch
    with pytest.raises(CorruptBlockError, match=reason):
        parse_stored_header(header)
    assert not well_formed(np.frombuffer(bytes(header), HEADER_DTYPE)).any()


@pytest.mark.parametrize("codec", PACKING)
def test_a_release_that_knows_version_1_only_refuses_version_2(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    header, _ = encode(*summed(KEY, PAYLOAD), codec)
    raw, _ = encode(*summed(KEY, PAYLOAD))
    monkeypatch.setattr(stored_form, "_VERSIONS", frozenset({1}))
    with pytest.raises(CorruptBlockError, match="unknown version 2"):
        parse_stored_header(header)
    assert parse_stored_header(raw).version == 1


@pytest.mark.parametrize("codec", PACKING)
def test_every_bit_of_a_packed_block_counts_before_it_is_unpacked(codec: Codec) -> None:
    header, stored = encode(*summed(KEY, like_bf16(256)), codec)
    for bit in range(8 * (HEADER_BYTES + len(stored))):
        flipped = bytearray(header + bytes(stored))
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptBlockError):
            verify(parse_stored_header(flipped), KEY, bytes(flipped[HEADER_BYTES:]))


def test_parts_of_two_ways_to_store_a_payload_do_not_meet() -> None:
    forms = [encode(*summed(KEY, PAYLOAD), codec)[0] for codec in Codec]
    forms += [build_v1(KEY, PAYLOAD, codec)[0] for codec in PACKING]
    other = encode(*summed(StoreKey(bytes(64)), PAYLOAD), Codec.LZ4)[0]
    assert len({parse_stored_header(header).fingerprint for header in [*forms, other]}) == len(forms) + 1
