"""kvtier's own traces: the file, and what is made of its records."""

import contextlib
from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import ConfigError
from kvtier.traces.form import Recorded, Request
from kvtier.traces.read import read_trace
from kvtier.traces.recorded import RequestMaker
from kvtier.traces.records import Disguise, Kind, Record, frame, header

KEYS = [bytes([number]) * 64 for number in range(4)]


def write(path: Path, *records: tuple[Kind, float, list[bytes]], **fields: str | int) -> Disguise:
    disguise = Disguise()
    content = frame(header({"source": "pool", **fields}))
    for kind, time_s, keys in records:
        content += frame(disguise.record(kind, time_s, b"tenant", 100, keys))
    path.write_bytes(content)
    return disguise


def test_a_trace_comes_back_without_its_keys(tmp_path: Path) -> None:
    path = tmp_path / "pool.trace"
    write(
        path,
        (Kind.LOOKUP, 0.0, KEYS[:3]),
        (Kind.WRITE, 1.0, KEYS[:3]),
        (Kind.LOOKUP, 20.0, KEYS),
        policy="lru",
        capacity_bytes=1000,
    )
    trace = read_trace(path)
    assert [(r.time_s, list(r.keys), r.is_write) for r in trace.requests] == [
        (0.0, [0, 1, 2], False),
        (1.0, [0, 1, 2], True),
        (20.0, [0, 1, 2, 3], False),
    ]
    assert (trace.num_keys, trace.block_bytes, trace.tokens_per_block) == (4, 100, None)
    assert trace.recorded == Recorded("lru", 10)
    assert not any(key[:8] in path.read_bytes() for key in KEYS)


def test_files_cannot_be_compared(tmp_path: Path) -> None:
    one, other = write(tmp_path / "a", policy="lru"), write(tmp_path / "b", policy="lru")
    assert one(KEYS[0]) == one(KEYS[0])
    assert one(KEYS[0]) != other(KEYS[0])


@pytest.mark.parametrize("num_torn", range(8, 60, 7))
def test_a_recording_that_was_cut_off_is_read_up_to_there(tmp_path: Path, num_torn: int) -> None:
    path = tmp_path / "pool.trace"
    write(path, (Kind.LOOKUP, 0.0, KEYS[:2]), (Kind.LOOKUP, 1.0, KEYS[2:]))
    path.write_bytes(path.read_bytes()[:-num_torn])
    assert [list(request.keys) for request in read_trace(path).requests] == [[0, 1]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (frame(header({}))[:9], "is no trace: name one"),
        (frame(msgpack.packb({"format": "other"})), "is no trace: name one"),
        (
            frame(msgpack.packb({"format": "kvtier-trace", "version": 9})),
            "version 9, and this kvtier reads version 1: use",
        ),
        (frame(header({})), "has no request in it: record while the cache is used"),
        (frame(header({}) + msgpack.packb([7, 0, b"", 0, b""])), r"\[7, 0, .* is no record; copy or record it anew"),
        (frame(header({}) + msgpack.packb([0, 0, b"", 0, b"odd"])), "is no record"),
        (frame(header({}) + msgpack.packb([0, 0, 1 << 60, 0, b""])), "is no record"),
        (frame(header({}) + msgpack.packb([0, "now", b"", 0, b""])), "is no record"),
        (frame(header({}) + msgpack.packb("text")), "is no record"),
        (frame(header({})) + b"nonsense", "is damaged and cannot be read"),
        (frame(header({}) + b"\xc1"), "is damaged and cannot be read"),
    ],
)
def test_damage_is_said_to_be_damage(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "pool.trace"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_trace(path)


def requests_of(*records: tuple[Kind, float, list[int]]) -> list[Request]:
    maker = RequestMaker()
    made = [maker.request(Record(kind, time_s, b"", 0, keys), 0) for kind, time_s, keys in records]
    return [request for request in made if request is not None]


def test_an_engine_that_polls_asks_once() -> None:
    made = requests_of(*((Kind.LOOKUP, 5.0 * turn, [1, 2]) for turn in range(20)), (Kind.LOOKUP, 200.0, [1, 2]))
    assert [request.time_s for request in made] == [0.0, 200.0]


def test_the_same_prompt_again_is_asked_again_once_the_first_was_served() -> None:
    made = requests_of(
        (Kind.LOOKUP, 0.0, [1, 2]), (Kind.READ, 0.1, [1]), (Kind.WRITE, 0.2, [2]), (Kind.LOOKUP, 0.3, [1, 2])
    )
    assert [(r.time_s, list(r.keys), r.is_write) for r in made] == [
        (0.0, [1, 2], False),
        (0.2, [2], True),
        (0.3, [1, 2], False),
    ]


def test_a_read_of_what_nobody_looked_up_is_a_request() -> None:
    made = requests_of((Kind.LOOKUP, 0.0, [1]), (Kind.READ, 1.0, [1, 2]), (Kind.READ, 700.0, [1]))
    assert [list(request.keys) for request in made] == [[1], [2], [1]]


@given(place=st.integers(0, 400), value=st.integers(0, 255))
def test_a_damaged_byte_is_never_a_crash(tmp_path_factory: pytest.TempPathFactory, place: int, value: int) -> None:
    path = tmp_path_factory.mktemp("damaged") / "pool.trace"
    write(path, (Kind.LOOKUP, 0.0, KEYS), (Kind.WRITE, 1.0, KEYS), policy="lru", capacity_blocks=9)
    content = bytearray(path.read_bytes())
    content[place % len(content)] = value
    path.write_bytes(content)
    with contextlib.suppress(ConfigError):
        assert read_trace(path).num_keys >= 0
