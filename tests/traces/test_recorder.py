"""The recorder: what comes back from its file, and that it drops rather than waits."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from clock_rig import StillClock
from kvtier.errors import ConfigError
from kvtier.traces.form import Recorded
from kvtier.traces.read import read_trace
from kvtier.traces.recorder import TraceRecorder
from kvtier.traces.records import Kind

KEYS = [bytes([number]) * 64 for number in range(8)]


@pytest.fixture
def clock() -> StillClock:
    return StillClock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pool.trace"


@pytest.fixture
def recorder(path: Path, clock: StillClock) -> Iterator[TraceRecorder]:
    recorder = TraceRecorder(path, {"policy": "lru", "capacity_blocks": 5}, max_bytes=1 << 20, clock=clock)
    recorder.start()
    yield recorder
    recorder.close()


def test_what_is_recorded_comes_back(recorder: TraceRecorder, path: Path, clock: StillClock) -> None:
    recorder.record(Kind.LOOKUP, b"red", KEYS[:3])
    clock.now_s += 20
    recorder.record(Kind.LOOKUP, b"blue", KEYS[2:4])
    recorder.record(Kind.WRITE, b"blue", KEYS[3:4], 4096)
    recorder.record(Kind.LOOKUP, b"blue", [])
    recorder.close()
    trace = read_trace(path)
    assert [(r.time_s, list(r.keys), r.tenant, r.is_write) for r in trace.requests] == [
        (0.0, [0, 1, 2], 0, False),
        (20.0, [2, 3], 1, False),
        (20.0, [3], 1, True),
    ]
    assert trace.recorded == Recorded("lru", 5)
    assert (trace.block_bytes, trace.num_dropped, recorder.num_dropped) == (4096, 0, 0)
    assert path.stat().st_mode & 0o777 == 0o600


def test_any_thread_may_record(recorder: TraceRecorder, path: Path) -> None:
    def some() -> None:
        for _ in range(100):
            recorder.record(Kind.READ, b"red", KEYS)

    threads = [threading.Thread(target=some) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.close()
    assert read_trace(path).num_references == 4 * 100 * len(KEYS)


def test_what_does_not_fit_into_the_queue_is_dropped_and_counted(path: Path) -> None:
    recorder = TraceRecorder(path, {}, max_bytes=1 << 20, max_queued_keys=10)
    recorder.start()
    recorder.record(Kind.READ, b"red", KEYS[:1])
    recorder.record(Kind.READ, b"red", KEYS + KEYS)  # more than ever fits
    recorder.close()
    assert recorder.num_dropped == 16
    trace = read_trace(path)
    assert (trace.num_references, trace.num_dropped) == (1, 16)


def test_nothing_is_recorded_after_the_end(recorder: TraceRecorder, path: Path) -> None:
    recorder.record(Kind.READ, b"red", KEYS)
    recorder.close()
    recorder.record(Kind.READ, b"red", KEYS)
    recorder.close()
    assert recorder.num_dropped == len(KEYS)
    assert read_trace(path).num_references == len(KEYS)


def test_the_file_never_gets_larger_than_it_may_be(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = TraceRecorder(path, {}, max_bytes=200)
    recorder.start()
    for number in range(1000):
        recorder.record(Kind.READ, b"red", [number.to_bytes(64)])
    recorder.close()
    assert path.stat().st_size <= 200
    assert recorder.num_dropped > 0
    assert "recording ends: the file may have 200 bytes" in caplog.text


def test_a_disk_that_fails_ends_the_recording_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    recorder = TraceRecorder(full, {}, max_bytes=1 << 20)
    recorder.start()
    recorder.close()
    recorder.record(Kind.READ, b"red", KEYS)
    assert recorder.num_dropped == len(KEYS)
    assert "No space left" in caplog.text


def test_the_file_of_an_earlier_run_is_kept(path: Path) -> None:
    for label in (b"first", b"second"):
        recorder = TraceRecorder(path, {}, max_bytes=1 << 20)
        recorder.start()
        recorder.record(Kind.READ, b"red", [label] * (2 if label == b"first" else 1))
        recorder.close()
    assert read_trace(path).num_references == 1
    assert read_trace(path.with_name("pool.trace.old")).num_references == 2


def test_a_folder_that_is_not_there_is_said_at_once(tmp_path: Path) -> None:
    recorder = TraceRecorder(tmp_path / "none" / "trace", {}, max_bytes=1)
    with pytest.raises(ConfigError, match="cannot be written: No such file or directory; name a file in a folder"):
        recorder.start()
    recorder.close()


def test_a_pipe_is_no_file(path: Path) -> None:
    """Opening one would wait for somebody who reads it, and a pool would not start until then."""
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="a pipe is there; name a file"):
        TraceRecorder(path, {}, max_bytes=1 << 20).start()


def test_what_is_no_trace_is_left_alone(path: Path) -> None:
    path.write_text("precious")
    with pytest.raises(ConfigError, match="a file is there that is no trace; name a file"):
        TraceRecorder(path, {}, max_bytes=1 << 20).start()
    assert path.read_text() == "precious"
    path.unlink()
    path.symlink_to(path.with_name("elsewhere"))
    with pytest.raises(ConfigError, match="cannot be written"):
        TraceRecorder(path, {}, max_bytes=1 << 20).start()
    assert not path.with_name("elsewhere").exists()
