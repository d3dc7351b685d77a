"""Calls to a neighbour that may be slow or dead: a deadline over all batches, a breaker, counters, a log line."""

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from kvtier.clock import MONOTONIC, Clock
from kvtier.errors import KvtierError, UnavailableError
from kvtier.metrics import Metrics
from kvtier.tiers.common.breaker import CircuitBreaker
from kvtier.tiers.common.probes import Admission, Probes


class RemoteCalls:
    """What tiers over a network do around each call. Any thread; no lock is held while the neighbour is asked.

    Failures are `KvtierError`s of the calls: counted in `io_errors` by exception (`BreakerOpen` for calls not
    made), and logged when the breaker opens and closes. While it is open, `Probes` asks the neighbour for a sign of
    life, and no call waits for it.
    """

    def __init__(  # noqa: PLR0913 - what may be set, by keyword
        self,
        name: str,
        *,
        metrics: Metrics,
        breaker: CircuitBreaker,
        log: logging.Logger,
        call_timeout_s: float,
        max_batch_bytes: int,
        max_batch_blocks: int,
        probe: Callable[[], object],
        clock: Clock = MONOTONIC,
    ) -> None:
        """
        :param name: the tier's, for metrics and log lines.
        :param call_timeout_s: seconds for all batches of one call together.
        :param max_batch_bytes: payload bytes in one batch; a block larger than that is a batch of its own.
        :param max_batch_blocks: blocks in one batch.
        :param probe: asks the neighbour for anything, by a deadline of its own; raises a `KvtierError` when it fails.
            May be under way when `close` returns.
        """
        self._name, self._about = name, {"tier": name}
        self._metrics = metrics
        self._breaker = breaker
        metrics.levels.watch_breaker(name, breaker)
        self._log = log
        self._call_timeout_s = call_timeout_s
        self._max_batch_bytes = max_batch_bytes
        self._max_batch_blocks = max_batch_blocks
        self._probe = probe
        self._probes = Probes(name, breaker, self._shows_life)
        self._clock = clock

    def in_batches(
        self, op: str, sizes: Sequence[int], ask: Callable[[slice, float], None], timeout_s: float | None = None
    ) -> None:
        """Calls `ask(batch, timeout_s)` on slices within the budgets, until one fails or time is up.

        :param sizes: payload bytes of each block.
        :param timeout_s: for all batches together, if less than `call_timeout_s`.
        """
        deadline = self._clock() + (timeout_s if timeout_s is not None else self._call_timeout_s)

        def ask_in_time(batch: slice) -> None:
            remaining_s = deadline - self._clock()
            if remaining_s <= 0:
                raise UnavailableError(f"no time left for blocks {batch.start} and after")
            ask(batch, remaining_s)

        for batch in self._batches(sizes):
            if not self.attempt(op, partial(ask_in_time, batch)):
                return

    def attempt(self, op: str, call: Callable[[], None]) -> bool:
        """Whether `call` came back with an answer; without, the neighbour failed or is left alone at the moment."""
        admission = self._probes.admit()
        if admission is Admission.NONE:
            self._metrics.io_errors.labels(self._name, op, "BreakerOpen").inc()
            return False
        try:
            return self._made(op, call)
        finally:
            if admission is Admission.TRIAL:
                self._probes.end_trial()

    def close(self) -> None:
        """Ends the probes. Does not wait for one that is under way, which may fail from now on."""
        self._probes.close()

    def _made(self, op: str, call: Callable[[], None]) -> bool:
        try:
            call()
        except KvtierError as error:
            self._metrics.io_errors.labels(self._name, op, type(error).__name__).inc()
            if self._breaker.failure():
                self._log.warning(
                    "tier %s: left alone for now, everything misses: %s", self._name, str(error), extra=self._about
                )
                self._probes.begin()
            return False
        if self._breaker.success():
            self._log.info("tier %s: answers again", self._name, extra=self._about)
        return True

    def _shows_life(self) -> bool:
        try:
            self._probe()
        except Exception as error:
            if not self._probes.is_closed:
                self._metrics.io_errors.labels(self._name, "probe", type(error).__name__).inc()
                if not isinstance(error, KvtierError):
                    self._log.exception("tier %s: a probe failed", self._name, extra=self._about)
            return False
        return True

    def _batches(self, sizes: Sequence[int]) -> Iterator[slice]:
        start = num_bytes = 0
        for i, size in enumerate(sizes):
            if i > start and (num_bytes + size > self._max_batch_bytes or i - start == self._max_batch_blocks):
                yield slice(start, i)
                start, num_bytes = i, 0
            num_bytes += size
        if start < len(sizes):
            yield slice(start, len(sizes))
