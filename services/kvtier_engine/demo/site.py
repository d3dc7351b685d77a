"""The pool of the demo, which stops, dies and starts again at the same two addresses."""

import time
from collections.abc import Callable
from types import TracebackType

from kvtier.cli.stats.samples import Samples, fetch
from kvtier.system.processes import Service
from kvtier_engine.demo.ask import Answer
from kvtier_engine.demo.stage import Stage

_SETTLED_WITHIN_S = 20.0
_POLL_S = 0.02


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Blocks until the condition holds; False when it does not within so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


class Site:
    """One pool at a Unix socket and a TCP port. One thread; a context manager, which stops the pool."""

    def __init__(self, stage: Stage, redis_url: str | None) -> None:
        self.stage = stage
        self.redis_url = redis_url
        self.unix = f"unix:{stage.folder / 'pool.sock'}"
        self.tcp = "127.0.0.1:0"
        """Has its port from the first start on."""
        self._service: Service | None = None
        self._metrics_url = ""
        self._num_expected = 0

    def start(self, disk: str = "pool-disk") -> float:
        """Starts the pool, and returns the seconds until it was ready."""
        begin = time.monotonic()
        self._service = self.stage.pool(listen=[self.unix, self.tcp], disk=disk, redis_url=self.redis_url)
        ready = self._service.ready()
        self.tcp = ready["block"].split(",")[1]
        self._metrics_url = f"http://{ready['http']}/metrics"
        self._num_expected = 0
        return time.monotonic() - begin

    def stop(self) -> None:
        """SIGTERM, and waits for the end."""
        assert self._service is not None
        self._service.stop()

    def kill(self) -> None:
        """SIGKILL."""
        assert self._service is not None
        self._service.kill()

    def read_blocks(self) -> dict[str, float]:
        """How many blocks have been read since the start, by the tier that had them."""
        return self._samples().by("kvtier_pool_read_blocks_total", "source")

    def expect(self, answer: Answer) -> None:
        """The engine that answered offers blocks to the pool now; `settle` waits for them, too."""
        self._num_expected += answer.num_saved_blocks

    def settle(self) -> None:
        """Waits until the pool has the blocks that it is to expect, and its disk and Redis have them from it."""
        wait_until(self._settled, _SETTLED_WITHIN_S)

    def _settled(self) -> bool:
        samples = self._samples()
        stored = samples.total("kvtier_pool_written_blocks_total")
        return stored >= self._num_expected and not samples.total("kvtier_pool_write_down_queue_bytes")

    def _samples(self) -> Samples:
        return fetch(self._metrics_url)

    def __enter__(self) -> "Site":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._service is not None:
            self._service.__exit__(kind, error, trace)
