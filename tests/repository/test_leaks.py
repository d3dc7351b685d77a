"""The fixtures that watch every test for leaks find them."""

import mmap
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.testing.leaks import Holdings, LeakError, leaving_no_shared_memory, require_nothing_beyond

SHORTLY = 0.05


def leak_a_thread() -> tuple[str, Callable[[], None]]:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="left-alone")
    thread.start()

    def undo() -> None:
        end.set()
        thread.join()

    return "thread left-alone", undo


def leak_a_daemon_of_ours() -> tuple[str, Callable[[], None]]:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="kvtier-writer", daemon=True)
    thread.start()

    def undo() -> None:
        end.set()
        thread.join()

    return "thread kvtier-writer", undo


def leak_a_socket() -> tuple[str, Callable[[], None]]:
    left = socket.socket()
    return "file descriptor socket:", left.close


def leak_a_file() -> tuple[str, Callable[[], None]]:
    fd = os.open(__file__, os.O_RDONLY)
    return f"file descriptor {__file__}", lambda: os.close(fd)


def leak_a_memfd() -> tuple[str, Callable[[], None]]:
    fd = os.memfd_create("kvtier-slab")
    return "file descriptor /memfd:kvtier-slab", lambda: os.close(fd)


def leak_a_process() -> tuple[str, Callable[[], None]]:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])

    def undo() -> None:
        child.kill()
        child.wait()

    return f"child process {child.pid}", undo


@pytest.mark.parametrize(
    "leak", [leak_a_thread, leak_a_daemon_of_ours, leak_a_socket, leak_a_file, leak_a_memfd, leak_a_process]
)
def test_a_leak_is_named(leak: Callable[[], tuple[str, Callable[[], None]]]) -> None:
    before = Holdings.now()
    name, undo = leak()
    try:
        with pytest.raises(LeakError, match=name):
            require_nothing_beyond(before, grace_s=SHORTLY)
    finally:
        undo()
    require_nothing_beyond(before)


def map_shared_memory() -> mmap.mmap:
    fd = os.memfd_create("kvtier-slab")
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
        return mmap.mmap(fd, mmap.PAGESIZE)
    finally:
        os.close(fd)


def test_shared_memory_that_stays_mapped_is_named() -> None:
    mapped: list[mmap.mmap] = []
    with pytest.raises(LeakError, match="memfd:kvtier-slab"), leaving_no_shared_memory(grace_s=SHORTLY):
        mapped.append(map_shared_memory())
    with leaving_no_shared_memory():
        mapped.pop().close()


def test_what_is_ending_is_waited_for() -> None:
    before = Holdings.now()
    timer = threading.Timer(SHORTLY, lambda: None)
    timer.start()
    require_nothing_beyond(before)
    assert not timer.is_alive()


def test_what_was_there_before_may_stay(tmp_path: Path) -> None:
    with open(tmp_path / "file", "wb"):
        before = Holdings.now()
        with open(tmp_path / "file", "rb"):
            pass
        require_nothing_beyond(before, grace_s=0)
