"""Threads for calls that may hang: few, and the process may end without them."""

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

_Answer = TypeVar("_Answer")
_Task = tuple["Future[Any]", Callable[[], Any]]


class IoThreads:
    """Does work on up to `most` threads, made when they are needed. Any thread.

    Unlike those of a `ThreadPoolExecutor`, which Python waits for at its exit, they are daemons. Where the process may
    have no more threads, fewer do the work, or whoever submits it.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        """Counts the threads that wait for work, less the work that is meant for them."""
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        """Guarded by _lock."""

    def submit(self, work: Callable[[], _Answer]) -> "Future[_Answer]":
        """Has the work done, unless the future is cancelled first. Not after `close`."""
        future: Future[_Answer] = Future()
        self._tasks.put((future, work))  # before a thread is started: one that finds nothing counts as idle
        if not self._idle.acquire(blocking=False) and not self._has_threads():
            with contextlib.suppress(Empty):  # somebody else has taken it
                if (task := self._tasks.get_nowait()) is not None:
                    _do(*task)
        return future

    def close(self, *, wait: bool = True) -> None:
        """Ends the threads when all is done that was submitted; waits for that, or not."""
        with self._lock:
            threads = list(self._threads)
        for _ in threads:
            self._tasks.put(None)
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
        while (task := self._next()) is not None:
            _do(*task)
            del task  # what it refers to is the caller's

    def _next(self) -> _Task | None:
        with contextlib.suppress(Empty):
            return self._tasks.get_nowait()
        self._idle.release()
        return self._tasks.get()


def _do(future: "Future[Any]", work: Callable[[], Any]) -> None:
    """Does the work on this thread, unless it was cancelled."""
    if future.set_running_or_notify_cancel():
        try:
            answer = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(answer)
