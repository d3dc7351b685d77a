"""Threads for calls that may hang: few, shared fairly, and the process may end without them."""

import contextlib
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

_Answer = TypeVar("_Answer")
_Task = tuple["Future[Any]", Callable[[], Any]]


class IoThreads:
    """Does work on up to `most` threads, made when they are needed. Any thread.

    Work waits in lines, and a thread that is free does the oldest work of the line whose turn it is. So what one tenant
    wants done waits for a thread and for one piece of work of each other tenant, however much those have submitted.

    Unlike those of a `ThreadPoolExecutor`, which Python waits for at its exit, they are daemons. Where the process may
    have no more threads, fewer do the work, or whoever submits it.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._waiting: SimpleQueue[bool] = SimpleQueue()
        """True for each task that waits, False for a thread to end."""
        self._idle = threading.Semaphore(0)
        """Counts the threads that wait for work, less the work that is meant for them."""
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        """Guarded by _lock, as what follows."""
        self._lines: OrderedDict[Hashable, deque[_Task]] = OrderedDict()
        """Tasks that wait, the oldest of each line first. The first line has its turn; none is empty."""

    def submit(self, work: Callable[[], _Answer], line: Hashable = None) -> "Future[_Answer]":
        """Has the work done, unless the future is cancelled first. Not after `close`.

        :param line: where it waits, such as its tenant.
        """
        future: Future[_Answer] = Future()
        with self._lock:
            self._lines.setdefault(line, deque()).append((future, work))
        self._waiting.put(True)  # before a thread is started: one that finds nothing counts as idle
        if not self._idle.acquire(blocking=False) and not self._has_threads():
            with contextlib.suppress(Empty):  # somebody else has taken it
                if self._waiting.get_nowait():
                    _do(*self._take())
        return future

    def close(self, *, wait: bool = True) -> None:
        """Ends the threads when all is done that was submitted; waits for that, or not."""
        with self._lock:
            threads = list(self._threads)
        for _ in threads:
            self._waiting.put(False)
        for thread in threads if wait else ():
            thread.join()

    def _has_threads(self) -> bool:
        """Starts one more, if there may be more. False: there is none."""
        with self._lock:
            if len(self._threads) < self._most:
                thread = threading.Thread(target=self._run, name=f"{self._name}_{len(self._threads)}", daemon=True)
                with contextlib.suppress(RuntimeError):  # the process may have no more
                    thread.start()
                    self._threads.append(thread)
            return bool(self._threads)

    def _run(self) -> None:
        while self._has_work():
            _do(*self._take())

    def _has_work(self) -> bool:
        """Waits for a task that is this thread's to take; False: it is to end."""
        with contextlib.suppress(Empty):
            return self._waiting.get_nowait()
        self._idle.release()
        return self._waiting.get()

    def _take(self) -> _Task:
        """The next task, for who has got a True."""
        with self._lock:
            line, tasks = next(iter(self._lines.items()))
            task = tasks.popleft()
            if tasks:
                self._lines.move_to_end(line)
            else:
                del self._lines[line]
            return task


def _do(future: "Future[Any]", work: Callable[[], Any]) -> None:
    """Does the work on this thread, unless it was cancelled."""
    if future.set_running_or_notify_cancel():
        try:
            answer = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(answer)
