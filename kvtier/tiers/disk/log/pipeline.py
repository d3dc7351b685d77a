"""A batch in parts: while some are on their way to or from the drive, others are packed or checked.

The drive is not to wait for the processor: a thread that moves parts has the next one packed before it is done with
this one, and leaves the last one to be checked by another thread. So as many parts are on their way as there are such
threads, and twice as many are in memory.
"""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from typing import TypeVar

_Part = TypeVar("_Part")
_Between = TypeVar("_Between")
_Answer = TypeVar("_Answer")


class Pipeline:
    """Threads of one direction. Any thread; `close` comes last."""

    def __init__(self, number: int, name: str) -> None:
        """
        :param number: parts on their way at once, and parts that are packed or checked meanwhile.
        :param name: of the threads.
        """
        self._number = number
        self.executor: Executor = ThreadPoolExecutor(number, thread_name_prefix=name)
        """The threads that move parts. For other I/O, too."""
        self._helpers = ThreadPoolExecutor(number, thread_name_prefix=f"{name}-helper")

    def read(
        self, parts: Iterable[_Part], load: Callable[[_Part], _Between], check: Callable[[_Between], _Answer]
    ) -> list[_Answer]:
        """`check(load(part))` of all parts, in any order; all are done on return. `load` waits for the drive."""

        def work(waiting: deque[_Part], answers: list[_Answer]) -> None:
            checking: Future[_Answer] | None = None
            while (part := _next(waiting)) is not None:
                loaded = load(part)
                if checking is not None:
                    answers.append(checking.result())
                if not waiting:
                    answers.append(check(loaded))
                    return
                checking = self._helpers.submit(check, loaded)
            if checking is not None:  # other threads have taken the rest
                answers.append(checking.result())

        return self._run(parts, work)

    def write(
        self, parts: Iterable[_Part], pack: Callable[[_Part], _Between], store: Callable[[_Between], _Answer]
    ) -> list[_Answer]:
        """`store(pack(part))` of all parts, likewise. `store` waits for the drive."""

        packing: deque[Future[_Between]] = deque()  # for whichever thread is free first

        def work(waiting: deque[_Part], answers: list[_Answer]) -> None:
            part = _next(waiting)
            packed = pack(part) if part is not None else None
            while packed is not None:
                if (part := _next(waiting)) is not None:
                    packing.append(self._helpers.submit(pack, part))
                answers.append(store(packed))
                following = _next(packing)
                packed = following.result() if following is not None else None

        return self._run(parts, work)

    def close(self) -> None:
        """Nobody calls any more."""
        self.executor.shutdown()
        self._helpers.shutdown()

    def _run(self, parts: Iterable[_Part], work: Callable[[deque[_Part], list[_Answer]], None]) -> list[_Answer]:
        waiting = deque(parts)
        answers: list[_Answer] = []
        futures = [self.executor.submit(work, waiting, answers) for _ in range(min(self._number, len(waiting)))]
        wait(futures)
        for future in futures:
            future.result()
        return answers


def _next(waiting: deque[_Part]) -> _Part | None:
    """Takes the first; None when there is none."""
    try:
        return waiting.popleft()
    except IndexError:
        return None
