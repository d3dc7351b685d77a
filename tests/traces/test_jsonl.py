"""Mooncake's JSON lines, plain and compressed, and what is wrong with others."""

import gzip
import json
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.traces.read import read_trace

LINES = [
    {"timestamp": 500, "input_length": 900, "output_length": 3, "hash_ids": [46, 7]},
    {"timestamp": 1500, "input_length": 600, "output_length": 3, "hash_ids": [46, 8]},
]
TEXT = "".join(json.dumps(line) + "\n" for line in LINES)


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_requests_keep_their_order_times_and_lengths(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(TEXT.encode()) if name.endswith("gz") else TEXT.encode())
    trace = read_trace(path)
    assert [(r.time_s, list(r.keys), r.num_tokens) for r in trace.requests] == [(0.0, [0, 1], 900), (1.0, [0, 2], 600)]
    assert (trace.name, trace.num_keys, trace.tokens_per_block) == (name, 3, 512)
    assert trace.num_references == 4
    assert trace.ideal_hit_rate() == 1 / 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no request in it"),
        (b"\n\n", "has no request in it"),
        (b"hello\n", r"line 1: .*a line is \{"),
        (TEXT.encode() + b"{}\n", "line 3: there is no 'timestamp'"),
        (b"[1]\n", "line 1: "),
        (b'{"timestamp": 1, "input_length": "5", "hash_ids": [1]}', "`timestamp` and `input_length` are numbers"),
        (b'{"timestamp": 1, "input_length": 5, "hash_ids": [[1]]}', "line 1: .*unhashable"),
        (b"\xff\xfe\n", "line 0: .*utf-8"),
        (b"[" * 100_000, "line 1: "),
        (gzip.compress(TEXT.encode(), mtime=0)[:-12], "cannot be read after line"),  # two workers, one test id
        (b"\x1f\x8b nonsense", "cannot be read after line 0"),
    ],
)
def test_what_is_no_trace_is_said_to_be_none(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "trace"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_trace(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none cannot be read: No such file or directory; name a trace"):
        read_trace(tmp_path / "none")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_trace(tmp_path)
