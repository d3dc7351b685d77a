"""What goes over one path to the pool: bytes, and the time of calls that move them."""

import contextlib
from collections.abc import Iterator
from typing import Literal

from kvtier.clock import MONOTONIC
from kvtier.metrics import Metrics


class PathCounts:
    """`Metrics.path_bytes` and `path_seconds` of one path. Any thread."""

    def __init__(self, path: str, metrics: Metrics | None) -> None:
        """
        :param path: the label: `shm`, `unix`, `tcp`, `tls` or `grpc`.
        :param metrics: None: nobody looks.
        """
        metrics = metrics if metrics is not None else Metrics()
        self.read_bytes, self.written_bytes = (metrics.path_bytes.labels(path, op) for op in ("read", "write"))
        self._seconds = {op: metrics.path_seconds.labels(path, op) for op in ("read", "write")}

    @contextlib.contextmanager
    def timed(self, op: Literal["read", "write"]) -> Iterator[None]:
        """Adds the time inside, whatever it ends with."""
        started = MONOTONIC()
        try:
            yield
        finally:
            self._seconds[op].inc(MONOTONIC() - started)
