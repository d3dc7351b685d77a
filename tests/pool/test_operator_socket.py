"""The operators' socket by itself: peers that are slow or many, a process without descriptors, a disk that hangs."""

import contextlib
import errno
import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvtier.config.reloading import Reloader
from kvtier.errors import InvalidInputError
from kvtier.traces.recorder import TraceRecorder
from kvtier_pool.operator_server import RECORD, OperatorServer
from kvtier_pool.operator_socket import Lines, address_of, send
from kvtier_pool.operator_verbs import OperatorVerbs
from kvtier_pool.recording import Record, Recordings
from kvtier_pool.service import PoolService
from pool_rig import WAIT_S, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")
REQUEST = {"max_bytes": 1 << 20, "seconds": 3600}


@contextlib.contextmanager
def recorder(path: Path, max_bytes: int) -> Iterator[TraceRecorder]:
    recorder = TraceRecorder(path, {}, max_bytes=max_bytes)
    recorder.start()
    yield recorder
    recorder.close()


class Server(OperatorServer):
    """One that records, and nothing else."""

    def __init__(self, record: Record = recorder) -> None:
        self.ending = threading.Event()
        self._recordings = Recordings(record)
        super().__init__({RECORD: self._record})

    def _record(self, connection: socket.socket, request: dict[str, Any]) -> None:
        self._recordings.serve(connection, request, self.ending.is_set)

    def stop(self) -> None:
        self.ending.set()
        super().stop()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    server.start()
    yield server
    server.stop()


@contextlib.contextmanager
def operator() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(WAIT_S)
        connection.connect(address_of(os.getpid()))
        yield connection


@pytest.mark.usefixtures("server")
def test_a_request_has_its_time_however_it_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """It kept a pool from ending."""
    monkeypatch.setattr("kvtier_pool.operator_server._REQUEST_S", 0.2)

    def is_cut() -> bool:
        with contextlib.suppress(BrokenPipeError):
            connection.sendall(b" ")
            return False
        return True

    with operator() as connection:
        until(is_cut)


def test_nested_deeply_is_no_message() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"[" * 60_000 + b"\n")
        with pytest.raises(InvalidInputError, match="no JSON"):
            Lines(ours).receive()


@pytest.mark.usefixtures("server")
def test_a_process_with_a_thousand_descriptors_records(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(1024):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        connection = stack.enter_context(operator())
        send(connection, {**REQUEST, "file": str(tmp_path / "trace")})
        lines = Lines(connection)
        assert "recording" in (lines.receive() or {})
        assert "seconds" in (lines.receive() or {})


@pytest.mark.usefixtures("server")
def test_others_who_connect_hasten_no_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier_pool.recording._PROGRESS_S", 0.2)
    with operator() as first, contextlib.ExitStack() as stack:
        send(first, {**REQUEST, "file": str(tmp_path / "trace")})
        lines = Lines(first)
        assert "recording" in (lines.receive() or {})
        for other in [stack.enter_context(operator()) for _ in range(5)]:
            send(other, {**REQUEST, "file": str(tmp_path / "another")})
            assert "somebody else" in str((Lines(other).receive() or {})["error"])
        progress = lines.receive()
        assert progress is not None
        assert progress["seconds"] > 0.1


def test_it_pauses_after_an_accept_that_failed_and_stops_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier_pool.operator_server._PAUSE_S", 3600.0)
    tried, tries = threading.Event(), []

    def refuse(listening: socket.socket) -> None:
        tries.append(listening)
        tried.set()
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket.socket, "accept", refuse)
    server = Server()
    server.start()
    assert tried.wait(WAIT_S)
    server.stop()
    assert len(tries) == 1


@pytest.mark.usefixtures("server")
def test_an_operator_for_whom_no_thread_is_to_be_had_is_told_so_and_the_next_one_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "kvtier-operator-call":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with operator() as connection:
            assert "no more threads" in str((Lines(connection).receive() or {})["error"])
    assert "can't start new thread" in caplog.text
    with operator() as connection:
        send(connection, {**REQUEST, "file": str(tmp_path / "trace")})
        assert "recording" in (Lines(connection).receive() or {})


def test_a_stop_does_not_wait_for_a_disk_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvtier_pool.operator_server._LAST_WAIT_S", 0.1)
    answers = threading.Event()

    @contextlib.contextmanager
    def hanging(path: Path, max_bytes: int) -> Iterator[TraceRecorder]:
        with recorder(path, max_bytes) as real:
            yield real
            answers.wait(WAIT_S)

    server = Server(hanging)
    server.start()
    with operator() as connection:
        send(connection, {**REQUEST, "file": str(tmp_path / "trace")})
        assert "recording" in (Lines(connection).receive() or {})
        server.stop()
        assert "a disk does not answer" in caplog.text
        answers.set()
        until(lambda: all(thread.name != "kvtier-operator-call" for thread in threading.enumerate()))


@pytest.mark.usefixtures("server")
def test_operators_who_say_nothing_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier_pool.operator_server._MOST_AT_ONCE", 2)
    with operator(), operator(), operator() as third:
        assert "enough operators" in str((Lines(third).receive() or {})["error"])


def test_a_purge_says_that_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier_pool.progress._PROGRESS_S", 0.05)
    may_end = threading.Event()
    report = {"removed": {"memory": 3}, "problems": [], "has_credentials": False}

    def purge(*named: object) -> dict[str, Any]:
        assert may_end.wait(WAIT_S)
        return report

    service = SimpleNamespace(recording=recorder, administration=SimpleNamespace(purge=purge))
    verbs = OperatorVerbs(cast(PoolService, service), cast(Reloader, None), lambda: False)
    server = OperatorServer(verbs.verbs())
    server.start()
    try:
        with operator() as connection:
            send(connection, {"verb": "purge", "tenant": "red"})
            lines = Lines(connection)
            assert [lines.receive() for _ in range(3)] == [{"purging": "red"}] * 3
            may_end.set()
            last = None
            while (message := lines.receive()) is not None:
                last = message
            assert last == report
    finally:
        may_end.set()
        server.stop()
