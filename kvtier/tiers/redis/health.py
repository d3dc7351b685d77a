"""Whether one server of a Redis is left alone at the moment: a breaker for each, counted and logged."""

import logging

from kvtier.errors import KvtierError
from kvtier.metrics import Metrics
from kvtier.tiers.common.breaker import CircuitBreaker


class Health:
    """What is known of one server. Any thread."""

    def __init__(self, tier: str, server: str, metrics: Metrics, breaker: CircuitBreaker, log: logging.Logger) -> None:
        """
        :param server: its name in log lines.
        :param breaker: the server's own.
        """
        self._tier, self._server, self._about = tier, server, {"tier": tier}
        self._metrics = metrics
        self._breaker = breaker
        metrics.levels.watch_breaker(tier, breaker)
        self._log = log

    @property
    def is_left_alone(self) -> bool:
        """Whether the server failed when it was last asked, and is not asked for now."""
        return self._breaker.is_open

    def forget(self) -> None:
        """The server is none of the tier's any longer: it counts as left alone no more."""
        self._metrics.levels.forget_breaker(self._tier, self._breaker)

    def allows(self, op: str) -> bool:
        """Whether the server may be asked now; counted if not."""
        allowed = self._breaker.allow()
        if not allowed:
            self._metrics.io_errors.labels(self._tier, op, "BreakerOpen").inc()
        return allowed

    def failed(self, op: str, error: KvtierError) -> None:
        """The server did not answer, or refused."""
        self._metrics.io_errors.labels(self._tier, op, type(error).__name__).inc()
        if self._breaker.failure():
            self._log.warning(
                "tier %s: %s left alone for now, its blocks miss: %s",
                self._tier,
                self._server,
                error,
                extra=self._about,
            )

    def worked(self) -> None:
        """The server answered."""
        if self._breaker.success():
            self._log.info("tier %s: %s answers again", self._tier, self._server, extra=self._about)
