"""`kvtier trace record`: a trace of a pool that runs, asked for by an operator on its host."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtier.traces.form import Recorded
from kvtier.traces.read import read_trace
from kvtier_pool.operator_socket import Lines, address_of, running_pools, send
from pool_rig import BLOCK_BYTES, MIB, WAIT_S, PoolProcess, connect, items, keys, pool_process, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")
COMMAND = [sys.executable, "-c", "from kvtier_pool.trace_command import app; app(prog_name='kvtier trace')", "record"]


@pytest.fixture(scope="module")
def pool() -> Iterator[PoolProcess]:
    with pool_process(memory="16MiB") as pool:
        yield pool


@contextmanager
def recording(pool: PoolProcess, path: Path, *options: str) -> Iterator["subprocess.Popen[str]"]:
    """The command, once the pool records."""
    command = [*COMMAND, str(path), "--pid", str(pool.process.pid), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line == f"recording to {path}, until Ctrl-C\n", (line, process.communicate(timeout=WAIT_S))
            yield process
        finally:
            process.kill()


def end(process: "subprocess.Popen[str]") -> str:
    out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, err
    return out


def use(pool: PoolProcess, labels: range) -> None:
    tier = connect(pool.block)
    try:
        tier.lookup(keys(labels))
        tier.write(items(labels))
    finally:
        tier.close()


def asked(pid: int, **request: object) -> dict[str, object]:
    """What the pool answers at once."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(WAIT_S)
        connection.connect(address_of(pid))
        with contextlib.suppress(BrokenPipeError):  # a refusal may be there already
            send(connection, request)
        answer = Lines(connection).receive()
        assert answer is not None
        return answer


def test_a_recording_lasts_until_ctrl_c(pool: PoolProcess, tmp_path: Path) -> None:
    path = tmp_path / "pool.trace"
    use(pool, range(100, 103))
    with recording(pool, path) as process:
        use(pool, range(5))
        process.send_signal(signal.SIGINT)
        said = end(process)
    use(pool, range(200, 203))
    assert "the operator ended it" in said
    trace = read_trace(path)
    assert trace.num_references == 5
    assert trace.recorded == Recorded("lru", 16 * MIB // BLOCK_BYTES)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_recording_ends_with_the_command_whatever_ends_that(pool: PoolProcess, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    with recording(pool, first) as process:
        use(pool, range(5))
        process.kill()
        process.wait(WAIT_S)
    request = {"file": str(second), "max_bytes": 1 << 20, "seconds": 0.001}
    until(lambda: "recording" in asked(pool.process.pid, **request) or None)
    assert read_trace(first).num_references == 5


@pytest.mark.parametrize(
    ("options", "reason"),
    [(("--seconds", "0.2"), "the time is over"), (("--max-bytes", "200"), "the file may have 200 bytes")],
)
def test_a_recording_is_bounded(pool: PoolProcess, tmp_path: Path, options: tuple[str, ...], reason: str) -> None:
    with recording(pool, tmp_path / "pool.trace", *options) as process:
        use(pool, range(64))
        said = end(process)
    assert reason in said
    assert (tmp_path / "pool.trace").stat().st_size <= 1000


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_recording_that_cannot_be_written_has_failed(pool: PoolProcess) -> None:
    with recording(pool, Path("/dev/full")) as process:
        out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, out) == (1, "")
    assert "the trace could not be written: No space left on device; make room or name" in err


def test_there_is_one_recording_at_a_time(pool: PoolProcess, tmp_path: Path) -> None:
    with recording(pool, tmp_path / "pool.trace") as process:
        answer = asked(pool.process.pid, file=str(tmp_path / "other"), max_bytes=1 << 20, seconds=1)
        assert "somebody else" in str(answer["error"])
        assert not (tmp_path / "other").exists()
        process.send_signal(signal.SIGINT)
        end(process)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"file": "relative", "max_bytes": 1, "seconds": 1}, "absolute path"),
        ({"file": "/nowhere/at/all", "max_bytes": 1, "seconds": 1}, "cannot be written"),
        ({"file": "/x", "max_bytes": 1, "seconds": 1e9}, "30 days"),
        ({"file": "/x", "max_bytes": 1, "seconds": float("nan")}, "30 days"),
        ({"file": "/x", "max_bytes": 1, "seconds": 10**400}, "30 days"),
        ({"file": "/\ud800", "max_bytes": 1, "seconds": 1}, "absolute path"),
        ({"file": "/x", "max_bytes": 1, "seconds": [[]]}, "a request has"),
        ({"file": "/x"}, "a request has"),
    ],
)
def test_what_makes_no_sense_is_refused(pool: PoolProcess, request_: dict[str, object], message: str) -> None:
    assert message in str(asked(pool.process.pid, **request_)["error"])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become somebody else")
def test_nobody_else_of_the_host_may_record(pool: PoolProcess, tmp_path: Path) -> None:
    code = (
        "import os, socket; os.setgroups([]); os.setgid(1234); os.setuid(1234)\n"
        "connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)\n"
        f"connection.connect({address_of(pool.process.pid)!r})\n"
        "print(connection.recv(1000).decode())"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S)
    assert "user 1234 may not operate this pool" in answer.stdout, answer.stderr


def test_a_pool_that_ends_keeps_what_it_has_recorded(tmp_path: Path) -> None:
    with pool_process() as pool, recording(pool, tmp_path / "pool.trace") as process:
        use(pool, range(5))
        code, _ = pool.terminate()
        assert code == 0
        assert "the pool ends" in end(process)
        assert pool.process.pid not in running_pools()
    assert read_trace(tmp_path / "pool.trace").num_references == 5


def test_a_pool_that_records_by_its_configuration_records_nothing_else(tmp_path: Path) -> None:
    with pool_process(f"--record-trace={tmp_path / 'pool.trace'}") as pool:
        answer = asked(pool.process.pid, file=str(tmp_path / "other"), max_bytes=1 << 20, seconds=1)
        assert "pool_service.record_trace is set" in str(answer["error"])


def test_the_command_does_not_guess_which_pool_is_meant(tmp_path: Path) -> None:
    with pool_process(), pool_process():
        answer = subprocess.run([*COMMAND, str(tmp_path / "x")], capture_output=True, text=True, timeout=WAIT_S)
    assert answer.returncode != 0
    assert "name one by --pid" in answer.stderr
