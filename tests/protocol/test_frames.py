"""The hand-made frames are protobuf's, byte for byte, and no message breaks the decoder."""

import tomllib
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.message import DecodeError
from grpc_tools import protoc
from hypothesis import example, given
from hypothesis import strategies as st

import kvtier.protocol
from kvtier.errors import InvalidInputError
from kvtier.protocol import pool_pb2
from kvtier.protocol.frames import MAX_FRAME_PAYLOAD_BYTES, Frame, decode_frames, encode_blocks
from kvtier.protocol.retention import PinStatus
from kvtier.tiers.base import Status, WriteStatus

ROOT = Path(__file__).parents[2]
WIRE = Path(kvtier.protocol.__file__).parent
MIB = 1 << 20

indexes = st.integers(min_value=0, max_value=2**32 - 1)
frames = st.builds(
    pool_pb2.Frame,
    block=indexes,
    status=st.sampled_from([0, 1, 2]),
    header=st.binary(max_size=200),
    payload=st.binary(max_size=300),
)


def as_protobuf(frame: Frame) -> pool_pb2.Frame:
    return pool_pb2.Frame(
        block=frame.block, status=frame.status, header=bytes(frame.header), payload=bytes(frame.payload)
    )


def test_golden_message() -> None:
    blocks = [(0, Status.MISS, b"", b""), (1, Status.HIT, b"HH", b"payload"), (300, Status.HIT, b"H", bytes(200))]
    assert list(encode_blocks(blocks)) == [
        bytes.fromhex("0a00")
        + bytes.fromhex("0a11 0801 1001 1a02 4848 2207") + b"payload"
        + bytes.fromhex("0ad301 08ac02 1001 1a01 48 22c801") + bytes(200)
    ]  # fmt: skip


@given(st.lists(st.tuples(indexes, st.sampled_from([0, 1]), st.binary(max_size=100), st.binary(max_size=300))))
def test_encoding_is_protobufs_own(blocks: list[tuple[int, int, bytes, bytes]]) -> None:
    expected = pool_pb2.Frames(
        frames=[pool_pb2.Frame(block=b, status=s, header=h, payload=p) for b, s, h, p in blocks]  # type: ignore[arg-type]
    )
    assert b"".join(encode_blocks(blocks)) == expected.SerializeToString(deterministic=True)


@given(st.lists(frames))
def test_decoding_understands_protobufs_encoding(written: list[pool_pb2.Frame]) -> None:
    message = pool_pb2.Frames(frames=written).SerializeToString()
    assert [as_protobuf(frame) for frame in decode_frames(message)] == written


@pytest.mark.parametrize("length", [0, 1, MIB - 1, MIB, MIB + 1, 2 * MIB, 5 * MIB // 2])
def test_large_blocks_are_split_and_come_back_whole(length: int) -> None:
    payload = bytes(range(256)) * (length // 256 + 1)
    payload = payload[:length]
    messages = list(encode_blocks([(7, 1, b"header", payload), (8, 1, b"next", b"x")]))
    assert all(len(message) < MIB + 4096 for message in messages)
    decoded = [frame for message in messages for frame in decode_frames(message)]
    assert all(len(frame.payload) <= MAX_FRAME_PAYLOAD_BYTES for frame in decoded)
    assert b"".join(bytes(frame.payload) for frame in decoded if frame.block == 7) == payload
    assert [bytes(frame.header) for frame in decoded if frame.header] == [b"header", b"next"]


def test_messages_full_of_misses_stay_small() -> None:
    messages = list(encode_blocks((i, Status.MISS, b"", b"") for i in range(65_536)))
    assert all(len(message) < MIB for message in messages)
    assert [f.block for m in messages for f in decode_frames(m)] == list(range(65_536))


def test_small_blocks_share_a_message() -> None:
    assert len(list(encode_blocks((i, 1, bytes(96), bytes(1000)) for i in range(100)))) == 1


def test_fields_in_any_order_unknown_ones_and_repetitions() -> None:
    fields = ["2201aa", "0809", "3801", "390102030405060708", "3d01020304", "2202bbcc", "0805", "1001"]
    frame = bytes.fromhex("".join(fields))
    (decoded,) = decode_frames(bytes((0x0A, len(frame))) + frame + bytes.fromhex("1003"))
    assert (decoded.block, decoded.status, bytes(decoded.payload)) == (5, 1, b"\xbb\xcc")
    theirs = pool_pb2.Frame.FromString(frame)
    assert (theirs.block, theirs.status, theirs.payload) == (5, 1, b"\xbb\xcc")


@example(bytes.fromhex("0a06108080808008")).via("a status that has more bits than protobuf reads of it")
@given(st.one_of(st.binary(max_size=200), st.binary(max_size=60).map(lambda b: bytes((0x0A, len(b))) + b)))
def test_garbage_is_a_clean_error_or_what_protobuf_reads(message: bytes) -> None:
    try:
        decoded = [as_protobuf(frame) for frame in decode_frames(message)]
    except InvalidInputError:
        return
    try:
        expected = pool_pb2.Frames.FromString(message)
    except DecodeError:
        return
    assert [(f.block, f.status, f.header, f.payload) for f in decoded] == [
        (f.block, f.status, f.header, f.payload) for f in expected.frames
    ]


@given(st.lists(frames, min_size=1), st.data())
def test_a_torn_message_is_a_clean_error_or_a_prefix(written: list[pool_pb2.Frame], data: st.DataObject) -> None:
    message = pool_pb2.Frames(frames=written).SerializeToString()
    cut = data.draw(st.integers(min_value=0, max_value=len(message) - 1))
    try:
        decoded = [as_protobuf(frame) for frame in decode_frames(message[:cut])]
    except InvalidInputError:
        return
    assert decoded == written[: len(decoded)]
    assert len(decoded) < len(written)


@pytest.mark.parametrize(
    "message",
    [
        "0a03088080",
        "0a0308ffff",
        "0a0b08ffffffffffffffffff7f",
        "0a0b0880808080808080808080",
        "0a0700000000000000",
        "0a010b",
        "0a05",
        "ff" * 11,
    ],
)
def test_broken_numbers_and_lengths(message: str) -> None:
    with pytest.raises(InvalidInputError):
        list(decode_frames(bytes.fromhex(message)))


@pytest.mark.parametrize(
    ("before", "number", "behind"),
    [(b"", 0x0A, b"\0"), (b"\x0a", 0, b""), (b"\x0a", 2, b"\x08\x05"), (b"\x08", 5, b"")],
    ids=["tag", "no length", "length", "value"],
)
def test_numbers_in_more_bytes_than_they_need_are_what_protobuf_takes(
    before: bytes, number: int, behind: bytes
) -> None:
    num_taken = 0
    for num_bytes in range(2, 12):
        message = before + bytes([number | 0x80, *([0x80] * (num_bytes - 2)), 0]) + behind
        if before == b"\x08":
            message = bytes([0x0A, len(message)]) + message
        try:
            taken = [as_protobuf(frame) for frame in decode_frames(message)]
        except InvalidInputError:
            continue
        num_taken += 1
        assert taken == list(pool_pb2.Frames.FromString(message).frames), num_bytes
    assert num_taken >= 4


def test_a_frame_above_the_limit_is_refused() -> None:
    message = pool_pb2.Frames(frames=[pool_pb2.Frame(payload=bytes(MAX_FRAME_PAYLOAD_BYTES + 1))])
    with pytest.raises(InvalidInputError, match=str(MAX_FRAME_PAYLOAD_BYTES)):
        list(decode_frames(message.SerializeToString()))


def test_status_bytes_are_the_tiers_own() -> None:
    assert {s.name: s.value for s in Status} == dict(pool_pb2.BlockStatus.items())
    assert {s.name: s.value for s in WriteStatus} == dict(pool_pb2.WriteStatus.items())
    assert {s.name: s.value for s in PinStatus} == dict(pool_pb2.PinResponse.Status.items())


def test_the_generated_module_is_that_of_the_proto(tmp_path: Path) -> None:
    """Compares meaning, not text: each release of protoc writes another text."""
    out = tmp_path / "pool.desc"
    proto = WIRE / "pool.proto"
    assert protoc.main(["protoc", f"-I{ROOT}", f"--descriptor_set_out={out}", str(proto)]) == 0
    (fresh,) = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    committed = descriptor_pb2.FileDescriptorProto.FromString(pool_pb2.DESCRIPTOR.serialized_pb)
    fresh.ClearField("source_code_info")
    for message in (fresh, committed):
        for descriptor in message.message_type:
            for field in descriptor.field:
                field.ClearField("json_name")
    assert committed == fresh


def test_the_generated_module_runs_with_the_oldest_protobuf_we_allow() -> None:
    """protoc stamps its runtime's version into the module, and an older runtime refuses it."""
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (oldest,) = [d.partition(">=")[2] for d in dependencies if d.startswith("protobuf>=")]
    (stamp,) = [
        line.rpartition(" ")[2]
        for line in (WIRE / "pool_pb2.py").read_text().splitlines()
        if line.startswith("# Protobuf Python Version: ")
    ]
    assert tuple(map(int, stamp.split("."))) <= tuple(map(int, oldest.split(".")))
