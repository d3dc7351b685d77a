"""Something that goes on in a thread of its own while something else is timed."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from kvtier.clock import MONOTONIC

_PATIENCE_S = 30.0


@contextlib.contextmanager
def meanwhile(move: Callable[[], int]) -> Iterator[Future[float]]:
    """Calls `move` again and again while the context lasts, the first call being over or well under way. Gives the
    bytes per second, known afterwards, which raises what `move` has raised.

    Gives the bytes per second, known afterwards, which raises what `move` has raised.

    :param move: returns how many bytes it has moved.
    """
    stop, under_way = threading.Event(), threading.Event()

    def run() -> float:
        begin, num_bytes = MONOTONIC(), 0
        try:
            while not stop.is_set():
                num_bytes += move()
                under_way.set()
        finally:
            under_way.set()  # nobody need wait for what has failed
        return num_bytes / max(MONOTONIC() - begin, 1e-9)

    with ThreadPoolExecutor(1, "kvtier-bench-meanwhile") as executor:
        speed = executor.submit(run)
        try:
            under_way.wait(_PATIENCE_S)
            yield speed
        finally:
            stop.set()
