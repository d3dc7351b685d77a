"""What a test leaves behind: threads, file descriptors, shared memory, child processes. Linux only."""

import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

GRACE_S = 5.0
"""Seconds for threads and connections that are ending. Only a leak takes as long."""
_OURS = "kvtier"
"""How threads and shared memory of this project are named."""
_SHARED_MEMORY = (b"/memfd:", b"/dev/shm/")
_SEMAPHORE = b"/dev/shm/sem."
"""Semaphores of multiprocessing: progress bars of libraries take one at their first use and keep it."""
_LIBRARIES = ("anon_inode:[eventpoll]", "anon_inode:[eventfd]", "/dev/null", "/dev/urandom")
"""Descriptors that libraries open at their first use and keep: gRPC's pollers, Python's."""
_DRIVERS = "/dev/nvidia"
"""The paths of files that a CUDA driver opens as it sees fit begin with this."""


class LeakError(AssertionError):
    """Something is still there: close it, stop it, or wait for it."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """What this process holds at a moment, each by a name that says what it is. A thing held twice counts twice."""

    threads: Counter[str]
    """Python threads that would keep the process alive, or are ours."""
    descriptors: Counter[str]
    """What open file descriptors refer to. Sockets, pipes and deleted files are told apart by inode."""
    children: Counter[str]
    """Processes started and not waited for, by id."""

    @classmethod
    def now(cls) -> "Holdings":
        """About 0.1 ms."""
        return cls(Counter(_threads()), Counter(_descriptors()), Counter(_children()))

    def beyond(self, before: "Holdings") -> list[str]:
        """What is here and was not there, for people."""
        kinds = (
            ("thread", self.threads - before.threads),
            ("file descriptor", self.descriptors - before.descriptors),
            ("child process", self.children - before.children),
        )
        return [f"{kind} {name}" for kind, more in kinds for name in more.elements()]


def require_nothing_beyond(before: Holdings, *, grace_s: float = GRACE_S) -> None:
    """Raises `LeakError`, naming what leaked, when the process holds more than `before`.

    Waits for what is on its way out, at most `grace_s`; costs 0.1 ms when nothing is.
    """
    _require_none(lambda: Holdings.now().beyond(before), grace_s)


@contextmanager
def leaving_no_shared_memory(*, grace_s: float = GRACE_S) -> Iterator[None]:
    """Raises `LeakError` when more shared memory is mapped, or lies in /dev/shm under our name, than before the block.

    Apart from the rest, because the look costs up to 1 ms in a process with large libraries. An exception
    of the block passes as it is.
    """
    before = _shared_memory()
    yield
    _require_none(lambda: [f"shared memory {name}" for name in (_shared_memory() - before).elements()], grace_s)


def _require_none(find: Callable[[], list[str]], grace_s: float) -> None:
    leaks = find()
    deadline = time.monotonic() + grace_s
    while leaks and time.monotonic() < deadline:
        time.sleep(0.01)
        if find() == leaks:
            gc.collect()  # a cycle, such as an exception and its frames, may hold the last reference
        leaks = find()
    if leaks:
        raise LeakError("left behind: " + ", ".join(leaks))


def _threads() -> Iterator[str]:
    for thread in threading.enumerate():
        if not thread.daemon or thread.name.startswith(_OURS):
            yield f"{thread.name} ({thread.ident})"


def _descriptors() -> Iterator[str]:
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:  # the listing's own, or another thread's
            continue
        if target not in _LIBRARIES and not target.startswith(_DRIVERS):
            yield target


def _children() -> Iterator[str]:
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/children") as file:
                yield from file.read().split()
        except (FileNotFoundError, ProcessLookupError):  # a thread that ended, or a kernel without the file
            continue


def _shared_memory() -> Counter[str]:
    with open("/proc/self/maps", "rb") as file:
        mapped = [line for line in file if any(place in line for place in _SHARED_MEMORY) and _SEMAPHORE not in line]
    files = [f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if name.startswith(_OURS)]
    return Counter([os.fsdecode(line.split(maxsplit=5)[5].strip()) for line in mapped] + files)
