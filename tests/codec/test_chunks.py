"""Chunks and planes that a codec unpacks: only where they belong, whatever a hostile one claims."""

import contextlib
import random
import resource
import struct
from types import ModuleType

import hypothesis.strategies as st
import pytest
from hypothesis import given

from codec_rig import KEY, like_bf16, load, signed
from kvtier.codec import bitshuffle, planes
from kvtier.codec.stored_form import Codec, decode_into
from kvtier.errors import CorruptBlockError

_PACKABLE = like_bf16(200_000)


def packed_by(codec: ModuleType, payload: bytes) -> bytearray:
    """An empty one would be refused whatever is tested."""
    packed = codec.pack(payload)
    assert packed is not None
    return bytearray(packed)


@pytest.mark.parametrize(
    ("offset", "patch"),
    [
        (0, b"\x03"),  # a later format
        (1, b"\x02"),
        (2, b"\x26"),  # a plain copy, which reads as many bytes as it claims
        (2, b"\x25"),  # byte shuffle
        (2, b"\x84"),  # another compressor
        (3, b"\x00"),  # no elements
        (4, struct.pack("<I", 2**31 - 17)),  # unpacks to 2 GiB
        (4, struct.pack("<I", 7999)),
        (8, struct.pack("<I", 0)),  # blocks of nothing
        (8, struct.pack("<I", 2**31 - 17)),
        (12, struct.pack("<I", 2**32 - 1)),
        (12, struct.pack("<I", 16)),
    ],
)
def test_what_a_hostile_chunk_claims_is_checked_before_the_library_sees_it(offset: int, patch: bytes) -> None:
    chunk = packed_by(bitshuffle, like_bf16(4000))
    chunk[offset : offset + len(patch)] = patch
    into = bytearray(8000)
    with pytest.raises(CorruptBlockError, match="lz4"):
        decode_into(signed(KEY, 8000, bytes(chunk)), KEY, chunk, memoryview(into))
    assert not any(into)


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 100])
def test_a_chunk_cut_short_is_corrupt(length: int) -> None:
    chunk = packed_by(bitshuffle, like_bf16(4000))[:length]
    chunk[12:16] = struct.pack("<I", length)
    with pytest.raises(CorruptBlockError, match="lz4"):
        bitshuffle.unpack_into(bytes(chunk[:length]), memoryview(bytearray(8000)))


@pytest.mark.parametrize(
    ("offset", "patch"),
    [
        (2, b"\x92"),  # a plain copy
        (2, b"\x91"),  # byte shuffle
        (2, b"\x30"),  # another compressor
        (4, struct.pack("<I", 2**31 - 17)),  # unpacks to 2 GiB
        (8, struct.pack("<I", 2**31 - 17)),
        (12, struct.pack("<I", 16)),
    ],
)
def test_what_a_hostile_plane_claims_is_checked_before_the_library_sees_it(offset: int, patch: bytes) -> None:
    packed = packed_by(planes, like_bf16(4000))
    packed[offset : offset + len(patch)] = patch
    with pytest.raises(CorruptBlockError, match="zstd"):
        load(signed(KEY, 8000, bytes(packed), Codec.PLANES_ZSTD), KEY, bytes(packed), 8000)


@pytest.mark.parametrize("nbytes", [0, 1, 7998, 7999, 8001, 8002, 2**20])
def test_planes_of_another_length_are_corrupt(nbytes: int) -> None:
    packed = bytes(packed_by(planes, like_bf16(4000)))
    with pytest.raises(CorruptBlockError):
        planes.unpack_into(packed, memoryview(bytearray(nbytes)))


@pytest.mark.parametrize("claimed", [2**31, 2**60])
def test_a_frame_that_claims_more_than_there_is_room_for_allocates_none_of_it(claimed: int) -> None:
    """zstd's own frame names a content size and a window too; neither is believed."""
    plane = like_bf16(70_000)[1::2]
    packed = packed_by(planes, like_bf16(70_000))
    frame = packed.index(struct.pack("<I", 0xFD2FB528))
    packed[frame + 4] = 0b11_0_0_0_0_00  # content size in 8 bytes, behind a byte for the window
    packed[frame + 5] = 0xFF  # the largest window there is
    packed[frame + 6 : frame + 14] = struct.pack("<Q", claimed)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CorruptBlockError):
        planes.unpack_into(packed, memoryview(bytearray(2 * len(plane))))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10, "in KiB"


@pytest.mark.parametrize("num_values", [128, 32 * 1024, 32 * 1024 + 1, 65_537, 200_000])
def test_planes_meet_where_they_are_spread(num_values: int) -> None:
    """Around the steps in which the high bytes are spread over their own place."""
    payload = random.Random(num_values).randbytes(num_values)
    payload = bytes(b for low in payload for b in (low, 0x3C | low >> 6))
    around = bytearray(b"\xa5" * (len(payload) + 2))
    planes.unpack_into(packed_by(planes, payload), memoryview(around)[1:-1])
    assert around == b"\xa5" + payload + b"\xa5"


def test_planes_of_values_at_an_odd_address() -> None:
    """The values have either sign and all low bytes; the low plane is stored as it is."""
    payload = b"".join(bytes((low, 0x3C | sign << 7)) for low in range(256) for sign in (0, 1, 1, 0, 1))
    packed = planes.pack(memoryview(b"\xa5" + payload)[1:])
    assert packed is not None
    assert packed[-len(payload) // 2 :] == payload[::2]
    into = bytearray(len(payload))
    planes.unpack_into(packed, memoryview(into))
    assert into == payload


@given(st.integers(min_value=0, max_value=2**32))
def test_hostile_planes_unpack_to_anything_but_nowhere_else(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice([512, 8000, 400_000])
    packed = packed_by(planes, _PACKABLE[:size])
    end = len(packed) - size // 2
    for _ in range(rng.choice([1, 4, 32])):
        packed[rng.randrange(16, rng.choice([40, end]))] = rng.randrange(256)
    around = bytearray(b"\xa5" * (size + 8192))
    with contextlib.suppress(CorruptBlockError):
        decode_into(signed(KEY, size, bytes(packed), Codec.PLANES_ZSTD), KEY, packed, memoryview(around)[4096:-4096])
    assert set(around[:4096] + around[-4096:]) == {0xA5}


@given(st.integers(min_value=0, max_value=2**32))
def test_a_hostile_chunk_unpacks_to_anything_but_nowhere_else(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice([512, 8000, 140_000])
    chunk = packed_by(bitshuffle, _PACKABLE[:size])
    for _ in range(rng.choice([1, 4, 32])):
        end = rng.choice([40, len(chunk)])  # the offsets of the blocks, or anything
        chunk[rng.randrange(16, end)] = rng.randrange(256)
    around = bytearray(b"\xa5" * (size + 8192))
    with contextlib.suppress(CorruptBlockError):
        decode_into(signed(KEY, size, bytes(chunk)), KEY, chunk, memoryview(around)[4096:-4096])
    assert set(around[:4096] + around[-4096:]) == {0xA5}
