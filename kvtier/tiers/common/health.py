"""What is known of one neighbour: whether it is left alone at the moment, counted, logged and found out again."""

import contextlib
import logging
from collections.abc import Callable, Iterator

from kvtier.errors import KvtierError
from kvtier.metrics import Metrics
from kvtier.tiers.common.breaker import CircuitBreaker
from kvtier.tiers.common.probes import Admission, Probes


class Health:
    """The breaker of a neighbour, with counters, log lines and probes. Any thread; nothing blocks.

    Failures are counted in `io_errors` by exception (`BreakerOpen` for calls not made), and logged when the breaker
    opens and closes. While it is open, `Probes` asks the neighbour for a sign of life, and no call waits for it.
    """

    def __init__(
        self,
        tier: str,
        *,
        metrics: Metrics,
        breaker: CircuitBreaker,
        log: logging.Logger,
        probe: Callable[[], object],
        server: str | None = None,
    ) -> None:
        """
        :param tier: the tier's name, for metrics and log lines.
        :param breaker: the neighbour's own.
        :param probe: asks the neighbour for anything, by a deadline of its own; raises a `KvtierError` when it fails.
            May be under way when `close` returns.
        :param server: the neighbour's name in log lines, where the tier has several.
        """
        self._tier, self._server, self._about = tier, server, {"tier": tier}
        self._metrics = metrics
        self._breaker = breaker
        metrics.levels.watch_breaker(tier, breaker)
        self._log = log
        self._probe = probe
        self._probes = Probes(tier if server is None else server, breaker, self._shows_life)

    @property
    def is_left_alone(self) -> bool:
        """Whether the neighbour failed when it was last asked, and is not asked for now."""
        return self._breaker.is_open

    @contextlib.contextmanager
    def asking(self, op: str) -> Iterator[bool]:
        """Gives whether the neighbour may be asked; it is counted if not. A caller that asks says how it went, by
        `worked` or `failed`, before the context ends."""
        admission = self._probes.admit()
        if admission is Admission.NONE:
            self._metrics.io_errors.labels(self._tier, op, "BreakerOpen").inc()
        try:
            yield admission is not Admission.NONE
        finally:
            if admission is Admission.TRIAL:
                self._probes.end_trial()

    def failed(self, op: str, error: KvtierError) -> None:
        """The neighbour did not answer, or refused."""
        self._metrics.io_errors.labels(self._tier, op, type(error).__name__).inc()
        if self._breaker.failure():
            if self._server is None:
                self._log.warning(
                    "tier %s: left alone for now, everything misses: %s", self._tier, error, extra=self._about
                )
            else:
                self._log.warning(
                    "tier %s: %s left alone for now, its blocks miss: %s",
                    self._tier, self._server, error, extra=self._about,
                )  # fmt: skip
            self._probes.begin()

    def worked(self) -> None:
        """The neighbour answered."""
        if self._breaker.success():
            name = "" if self._server is None else f"{self._server} "
            self._log.info("tier %s: %sanswers again", self._tier, name, extra=self._about)

    def close(self) -> None:
        """Ends the probes. Does not wait for one that is under way, which may fail from now on."""
        self._probes.close()

    def forget(self) -> None:
        """Closes it, and the neighbour is none of the tier's any longer: it counts as left alone no more."""
        self.close()
        self._metrics.levels.forget_breaker(self._tier, self._breaker)

    def _shows_life(self) -> bool:
        try:
            self._probe()
        except Exception as error:
            if not self._probes.is_closed:
                self._metrics.io_errors.labels(self._tier, "probe", type(error).__name__).inc()
                if not isinstance(error, KvtierError):
                    self._log.exception("tier %s: a probe failed", self._tier, extra=self._about)
            return False
        return True
