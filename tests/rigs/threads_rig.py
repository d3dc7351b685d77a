"""A process that may have no more threads."""

import contextlib
import threading
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def no_more_threads(named: str = "") -> Iterator[None]:
    """None can be started whose name begins so. A limit of the system's would count those of all processes."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith(named):
            raise RuntimeError("can't start new thread")
        start(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        yield
