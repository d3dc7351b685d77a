"""What the gateway counts. Labels name tenants, keys and engines, as the configuration does."""

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram

_TTFB_BUCKETS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_OWN_BUCKETS_S = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.2, 1.0)
OUTCOMES = ("answered", "refused", "unreachable", "lost", "hung", "timeout", "cancelled")
"""How an attempt at an engine ended: with an answer; with a 502, 503 or 504; without a connection; with one that broke;
with the engine given up; without an answer in time; with its client gone away."""

LOOKUPS = ("answered", "late", "failed", "not_asked")


class GatewayMetrics:
    """Owns nothing but the counters; `registry` is the caller's. Event loop only, but for scrapes."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        counter, histogram = partial(Counter, registry=registry), partial(Histogram, registry=registry)
        self.requests = counter(
            "kvtier_gateway_requests",
            "Requests of known keys by the status of their answer; 499: the client went away before it",
            ["tenant", "status"],
        )
        self.refusals = counter(
            "kvtier_gateway_refusals",
            "Requests that were answered by the gateway itself, by the code of the error; key: empty where it is not "
            "known",
            ["key", "code"],
        )
        self.attempts = counter(
            "kvtier_gateway_attempts",
            f"Requests that were given to an engine, by how that ended: {', '.join(OUTCOMES)}",
            ["engine", "outcome"],
        )
        self.choices = counter(
            "kvtier_gateway_choices", "Choices of engines by the reason that the strategy gives", ["reason"]
        )
        self.broken_streams = counter(
            "kvtier_gateway_broken_answers",
            "Answers that had begun when their engine failed: the client got an error at their end",
            ["engine"],
        )
        self.stripped = counter(
            "kvtier_gateway_stripped_parameters",
            "Parameters that were taken out of requests because clients may not set them",
            ["parameter"],
        )
        self.stalled = counter(
            "kvtier_gateway_stalled_clients",
            "Connections that were cut because their client took or sent no byte for send_timeout_s",
        )
        self.first_byte_seconds = histogram(
            "kvtier_gateway_first_byte_seconds",
            "End of a request's body to the first byte of its answer, over all attempts",
            buckets=_TTFB_BUCKETS_S,
        )
        self.prediction_error_seconds = histogram(
            "kvtier_gateway_prediction_error_seconds",
            "Between the time to first token that the strategy has expected and what it was",
            buckets=_TTFB_BUCKETS_S,
        )
        self.regret_seconds = counter(
            "kvtier_gateway_regret_seconds",
            "Seconds by which first tokens came later than the strategy had expected of another engine",
        )
        self.pool_lookups = counter(
            "kvtier_gateway_pool_lookups",
            "Lookups of prompts in the pool: answered, late, failed, not_asked (too many wait)",
            ["outcome"],
        )
        for outcome in LOOKUPS:
            self.pool_lookups.labels(outcome)
        self.own_seconds = histogram(
            "kvtier_gateway_own_seconds",
            "End of a request's body until it goes to the first engine: what the gateway adds",
            buckets=_OWN_BUCKETS_S,
        )

    def begin_engine(self, engine: str) -> None:
        """Makes the samples of an engine, so that they read 0 before anything has happened."""
        for outcome in OUTCOMES:
            self.attempts.labels(engine, outcome)
        self.broken_streams.labels(engine)

    def forget_engine(self, engine: str) -> None:
        """Removes the samples of an engine that is gone, since addresses of others follow without end."""
        for outcome in OUTCOMES:
            self.attempts.remove(engine, outcome)
        self.broken_streams.remove(engine)
