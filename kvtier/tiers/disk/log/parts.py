"""A batch in parts, several of which are on their way to or from the drive at once."""

from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, wait
from typing import TypeVar

_Part = TypeVar("_Part")
_Answer = TypeVar("_Answer")


def in_parallel(executor: Executor, work: Callable[[_Part], _Answer], parts: Iterable[_Part]) -> list[_Answer]:
    """`work` of each part, in order. All are done when it returns or raises: then nobody uses the caller's memory."""
    futures: list[Future[_Answer]] = []
    try:
        for part in parts:
            futures.append(executor.submit(work, part))
    finally:
        wait(futures)
    return [future.result() for future in futures]
