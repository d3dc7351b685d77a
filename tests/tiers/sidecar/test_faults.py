"""A tier process that dies, hangs or is orphaned: misses, never wrong bytes, nothing left behind."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from aside_rig import BLOCK_BYTES, MIB, PATIENCE_S, Heard, start, until
from kvtier.errors import UnavailableError
from kvtier.events import EventKind
from kvtier.memory.arena import Arena
from kvtier.metrics import Metrics
from kvtier.testing.contract import make_key, make_payload, summed
from kvtier.tiers.base import Status, WriteStatus
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.sidecar import SidecarTier, TierProcess
from suspending import suspend

KEY = make_key("a")


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(16, BLOCK_BYTES, shared=True)
    yield arena
    arena.close()


def restarts(metrics: Metrics) -> float | None:
    return metrics.registry.get_sample_value("kvtier_io_process_restarts_total")


def pid_of(process: TierProcess) -> int:
    pid = process.pid
    assert pid is not None
    return pid


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_no_byte_comes_from_a_process_whose_call_was_answered(
    signum: signal.Signals, tmp_path: Path, arena: Arena
) -> None:
    """Killed or stopped in the middle of a read, and let run again when its buffer is another block's."""
    held, metrics = tmp_path / "held", Metrics()
    held.touch()
    process = start(arena, "scribbling", str(held), metrics=metrics, call_timeout_s=3.0)
    tier, buffer, pid = SidecarTier("scribbling", process), arena.view(3), pid_of(process)
    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(tier.read, [KEY], [buffer])
        until(lambda: any(buffer), "the read has begun")
        os.kill(pid, signum)
        assert reading.result(PATIENCE_S) == [Status.MISS]
    assert not psutil.pid_exists(pid)
    with_suppressed_kill(pid, signal.SIGCONT)
    other = make_payload("other", BLOCK_BYTES)
    buffer[:] = other
    time.sleep(0.05)
    assert bytes(buffer) == other
    held.unlink()
    until(lambda: process.pid not in (None, pid), "another process serves")
    assert tier.write([summed(KEY, buffer)]) == [WriteStatus.STORED]
    assert tier.read([KEY], [arena.view(4)]) == [Status.HIT]
    assert bytes(arena.view(4)) == other
    assert restarts(metrics) == 1
    errors = {"tier": "scribbling", "op": "read", "error": "TierProcess"}
    assert metrics.registry.get_sample_value("kvtier_io_errors_total", errors) == 1
    process.close()


def with_suppressed_kill(pid: int, signum: signal.Signals) -> None:
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        return


def test_every_call_in_flight_is_answered(tmp_path: Path, arena: Arena) -> None:
    held = tmp_path / "held"
    held.touch()
    process = start(arena, "scribbling", str(held), call_timeout_s=PATIENCE_S)
    tier, pid = SidecarTier("scribbling", process), pid_of(process)
    buffers = [arena.view(slot) for slot in range(4)]
    with ThreadPoolExecutor(4) as threads:
        reads = [threads.submit(tier.read, [KEY], [buffer]) for buffer in buffers]
        until(lambda: all(any(buffer) for buffer in buffers), "all reads have begun")
        os.kill(pid, signal.SIGKILL)
        assert [read.result(PATIENCE_S) for read in reads] == [[Status.MISS]] * 4
    # Until another one serves, at once:
    assert tier.lookup([KEY]) == [Status.MISS]
    held.unlink()
    process.close()


def test_a_disk_is_known_again_after_a_restart(tmp_path: Path, arena: Arena) -> None:
    heard = Heard()
    process = start(arena, "disk", json.dumps([str(tmp_path / "disk"), 4 * MIB]), on_event=heard)
    tier, pid = SidecarTier("disk", process), pid_of(process)
    keys = [make_key(i) for i in range(8)]
    payloads = [make_payload(i, BLOCK_BYTES) for i in range(8)]
    for slot, payload in enumerate(payloads):
        arena.view(slot)[:] = payload
    assert tier.write([summed(key, arena.view(i)) for i, key in enumerate(keys)]) == [WriteStatus.STORED] * 8
    os.kill(pid, signal.SIGKILL)
    until(lambda: process.pid not in (None, pid), "another process serves")
    assert EventKind.CLEARED in [event.kind for event in heard.events]
    assert heard.keys == set(keys)
    assert tier.read(keys, [arena.view(8 + i) for i in range(8)]) == [Status.HIT] * 8
    assert [bytes(arena.view(8 + i)) for i in range(8)] == payloads
    process.close()


def test_close_while_there_is_no_process(tmp_path: Path, arena: Arena) -> None:
    """The folder of its disk is taken: every restart fails until the end."""
    folder = tmp_path / "disk"
    process = start(arena, "disk", json.dumps([str(folder), MIB]))
    pid = pid_of(process)
    suspend(pid)
    (folder.rename(tmp_path / "away"), folder.write_text("not a folder"))
    os.kill(pid, signal.SIGKILL)
    until(lambda: process.pid is None, "the death was noticed")
    with pytest.raises(UnavailableError):
        process.call("usage", {"tier": "disk"})  # type: ignore[arg-type]
    process.close()
    assert process.pid is None


@pytest.mark.parametrize("is_owed", [False, True], ids=["nothing owed", "discards owed"])
def test_close_waits_for_no_tiers_that_are_slow_to_open(is_owed: bool, tmp_path: Path, arena: Arena) -> None:
    held = tmp_path / "held"
    settings = json.dumps([str(tmp_path / "disk"), MIB, str(held)])
    process = start(arena, "held_disk", settings, close_timeout_s=0.2 if is_owed else PATIENCE_S)
    tier, pid = SidecarTier("disk", process), pid_of(process)
    held.touch()
    os.kill(pid, signal.SIGKILL)
    try:
        until(lambda: any(child.pid != pid for child in psutil.Process().children()), "another process is started")
        assert not is_owed or tier.discard([KEY]) == 0
        with ThreadPoolExecutor(1) as threads:
            try:
                threads.submit(process.close).result(PATIENCE_S / 2)
            finally:
                held.unlink()
    finally:
        process.close()
    assert not psutil.Process().children()


def test_close_gives_a_process_that_opens_time_to_forget_what_is_owed(tmp_path: Path, arena: Arena) -> None:
    held, folder = tmp_path / "held", tmp_path / "disk"
    process = start(arena, "held_disk", json.dumps([str(folder), MIB, str(held)]))
    tier, pid = SidecarTier("disk", process), pid_of(process)
    arena.view(0)[:] = make_payload("a", BLOCK_BYTES)
    assert tier.write([summed(KEY, arena.view(0))]) == [WriteStatus.STORED]
    held.touch()
    os.kill(pid, signal.SIGKILL)
    until(lambda: process._opening is not None, "another process opens its tiers")
    assert tier.discard([KEY]) == 0
    with ThreadPoolExecutor(1) as threads:
        closed = threads.submit(process.close)
        until(process._closing.is_set, "close has begun")
        held.unlink()
        closed.result(PATIENCE_S)
    found = DiskTier.open(folder, MIB, reserve_bytes=0)
    assert found.lookup([KEY]) == [Status.MISS]
    found.close()


def test_killed_again_and_again(arena: Arena) -> None:
    """Readers and a killer: answers are right or missing, and nothing is left."""
    process = start(arena, "memory", str(MIB), call_timeout_s=5.0)
    tier = SidecarTier("memory", process)
    over = threading.Event()
    hits = [0] * 4

    def work(worker: int) -> None:
        turn = 0
        while not over.is_set():
            turn += 1
            key, buffer = make_key((worker, turn)), arena.view(2 * worker)
            payload = make_payload((worker, turn), BLOCK_BYTES)
            buffer[:] = payload
            if tier.write([summed(key, buffer)]) == [WriteStatus.STORED]:
                into = arena.view(2 * worker + 1)
                into[:] = bytes(BLOCK_BYTES)
                if tier.read([key], [into]) == [Status.HIT]:
                    assert bytes(into) == payload
                    hits[worker] += 1

    with ThreadPoolExecutor(4) as threads:
        workers = [threads.submit(work, worker) for worker in range(4)]

        def are_served() -> bool:
            return all(hits) or any(worker.done() for worker in workers)

        try:
            for _ in range(3):
                hits[:] = [0] * 4
                until(are_served, "a process serves")
                pid = pid_of(process)
                os.kill(pid, signal.SIGKILL)
                until(lambda pid=pid: process.pid != pid, "the death was noticed")  # type: ignore[misc]
            hits[:] = [0] * 4
            until(are_served, "a process serves")
        finally:
            over.set()
        for worker in workers:
            worker.result(PATIENCE_S)
    process.close()


_ENGINE = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from aside_rig import start, MIB, BLOCK_BYTES
from kvtier.device.kv import Arena
process = start(Arena(4, BLOCK_BYTES, shared=True), "memory", str(MIB))
if sys.argv[2] == "stopped":
    os.kill(process.pid, signal.SIGSTOP)
print(process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("state", ["running", "stopped"])
def test_it_dies_with_its_engine(state: str) -> None:
    command = [sys.executable, "-c", _ENGINE, str(Path(__file__).parents[2] / "rigs"), state]
    engine = subprocess.run(command, stdout=subprocess.PIPE, timeout=PATIENCE_S, check=False)
    assert engine.returncode == -signal.SIGKILL
    pid = int(engine.stdout)
    until(lambda: not _runs(pid), "the tier process has ended")


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
