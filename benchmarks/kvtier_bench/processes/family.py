"""A process and those that it has started, as /proc shows them: which they are, and when all have come to rest."""

import contextlib
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from kvtier.errors import KvtierError

_PATIENCE_S = 60.0
_LOOK_S = 0.01
_NUM_LOOKS = 5
"""The looks in a row that have to find every thread asleep: one wakes the next by way of a socket or a lock, and is not
asleep before it has done so, but a thread may wake by itself for a moment."""
_ASLEEP = frozenset("SIZX")
"""The states of threads that want no processor: sleeping, idle, dead."""


def family(pid: int) -> tuple[int, ...]:
    """Returns the process ids of a process, its children, and theirs. Linux only."""
    children = [int(child) for task in _tasks(pid) for child in _read(task / "children").split()]
    return (pid, *(member for child in children for member in family(child)))


def await_rest(pids: Iterable[int]) -> None:
    """Blocks until no thread of these processes runs or wants to. Raises `KvtierError` after a minute.

    A busy machine makes no difference: a thread that waits for a processor is not at rest.
    """
    waiting, num_looks = list(pids), 0
    deadline = time.monotonic() + _PATIENCE_S
    while num_looks < _NUM_LOOKS:
        time.sleep(_LOOK_S)
        num_looks = num_looks + 1 if all(map(_is_asleep, waiting)) else 0
        if time.monotonic() > deadline:
            raise KvtierError(f"processes {waiting} have not come to rest in {_PATIENCE_S:.0f} s")


def _is_asleep(pid: int) -> bool:
    return all(_state(task) in _ASLEEP for task in _tasks(pid))


def _state(task: Path) -> str:
    """The letter behind the name, which is in parentheses and may have some itself."""
    return _read(task / "stat").rpartition(")")[2].strip()[:1] or "X"


def _tasks(pid: int) -> Iterator[Path]:
    with contextlib.suppress(FileNotFoundError):
        yield from Path(f"/proc/{pid}/task").iterdir()


def _read(path: Path) -> str:
    """The text of a file, empty if its thread has ended."""
    with contextlib.suppress(OSError):
        return path.read_text()
    return ""
