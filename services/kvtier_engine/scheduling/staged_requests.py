"""The requests that have not ended, by stage."""

from collections import deque
from collections.abc import Iterator

from kvtier_engine.scheduling.metrics import EngineMetrics
from kvtier_engine.scheduling.prefix_cache import PrefixCache
from kvtier_engine.scheduling.request import Request, Stage


class StagedRequests:
    """Moves requests from stage to stage. Scheduler thread only."""

    def __init__(self, cache: PrefixCache, metrics: EngineMetrics) -> None:
        self._cache, self._metrics = cache, metrics
        self.waiting: deque[Request] = deque()
        """Waiting requests, the one that begins next first."""
        self.loading: list[Request] = []
        """Ended ones too, until their blocks are left alone."""
        self.running: list[Request] = []
        """Running requests in the order of their arrival."""

    def __len__(self) -> int:
        return len(self.waiting) + len(self.loading) + len(self.running)

    def __iter__(self) -> Iterator[Request]:
        """Yields all requests of now, whatever becomes of them meanwhile."""
        return iter((*self.waiting, *self.loading, *self.running))

    @property
    def begun(self) -> tuple[Request, ...]:
        """Requests that have blocks."""
        return (*self.loading, *self.running)

    def take_loaded(self) -> None:
        """Runs the requests whose loads are over, and gives back the blocks of those that have ended meanwhile."""
        for request in self._cache.poll():
            self.loading.remove(request)
            if request.stage is Stage.ENDED:
                self._cache.release(request)
            elif request.begins_anew:
                self._cache.release(request)
                if request.spans is not None:
                    request.spans.enter("queue")
                self.wait_first(request)
            else:
                self.run(request)

    def load(self, request: Request) -> None:
        """The request has its blocks, and its load is under way."""
        request.stage = Stage.LOADING
        self.loading.append(request)

    def run(self, request: Request) -> None:
        """The request has all that it needs to compute."""
        if request.spans is not None:
            request.spans.enter("prefill", tokens=request.num_to_compute)
        request.stage = Stage.RUNNING
        self.join_running(request)

    def join_running(self, *requests: Request) -> None:
        """Puts running requests among the others."""
        self.running += requests
        self.running.sort(key=lambda r: r.order)

    def wait_first(self, request: Request) -> None:
        """The request, which has no blocks, is the next to begin."""
        request.stage = Stage.WAITING
        self.waiting.appendleft(request)

    def preempt(self, request: Request) -> None:
        """Takes the blocks of a running request, which begins again later."""
        self.running.remove(request)
        self._cache.release(request)
        request.begins_anew = False  # what it had computed may be below by now
        if request.spans is not None:
            request.spans.enter("queue", preempted=True)
        self.wait_first(request)
        self._metrics.preemptions.inc()

    def withdraw(self, request: Request) -> None:
        """Gives back the blocks of a request that ends, those of a load as soon as it leaves them alone."""
        if request.stage is Stage.WAITING:
            self.waiting.remove(request)
            self._cache.cancel_lookup(request)
        elif request.stage is Stage.LOADING:
            self._cache.cancel_load(request)
        else:
            self.running.remove(request)
            self._cache.release(request)
