"""What the engine counts. One instance per registry and engine."""

from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvtier_engine.scheduling.completion import Completion, FinishReason
from kvtier_engine.scheduling.compute_times import Computed

_TTFT_BUCKETS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class EngineMetrics:
    """Counters of one engine; changed by the scheduler thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"kvtier_engine_{name}", text, labels, registry=registry)

        self.registry = registry
        self.requests = counter("requests", "Requests that ended: stop, length, cancelled, failed", "reason")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts")
        self.cached_tokens = counter("cached_tokens", "Prompt tokens that were not computed, by tier", "tier")
        self.computed_prompt_tokens = counter("computed_prompt_tokens", "Tokens of prompts, computed and timed")
        self.prompt_seconds = counter("prompt_seconds", "What the model took for these, without what is beside them")
        self.answer_tokens = counter("answer_tokens", "Tokens generated")
        self.preemptions = counter("preemptions", "Requests that lost their blocks and started again")
        self.step_seconds = counter("step_seconds", "Time in steps that computed something")
        self.forward_seconds = counter("forward_seconds", "From launching the model to having its result")
        self.cache_seconds = counter("cache_seconds", "In hashing, lookup, allocation and other cache bookkeeping")
        self.running = Gauge(
            "kvtier_engine_running", "Answers in the batch: of a request, as many as it asks for", registry=registry
        )
        self.waiting = Gauge("kvtier_engine_waiting", "Requests waiting or loading", registry=registry)
        for reason in get_args(FinishReason):
            self.requests.labels(reason)
        for tier in ("device", "host", "disk", "pool"):
            self.cached_tokens.labels(tier)
        self.ttft_seconds = Histogram(
            "kvtier_engine_ttft_seconds",
            "Arrival of a request to its first new token",
            buckets=_TTFT_BUCKETS_S,
            registry=registry,
        )
        self.cold_ttft_seconds = Histogram(
            "kvtier_engine_cold_ttft_seconds",
            "The same of requests of whose prompts nothing was cached",
            buckets=_TTFT_BUCKETS_S,
            registry=registry,
        )

    def book(self, computed: Computed) -> None:
        """Adds the time of steps that are over. What falls to prompts is their part of the tokens: chunks of two tokens
        or more are of prompts, and steps that waited for a load are left out."""
        self.forward_seconds.inc(computed.seconds)
        num_tokens = sum(count for count in computed.num_tokens if count > 1)
        if computed.is_pure and num_tokens:
            self.computed_prompt_tokens.inc(num_tokens)
            self.prompt_seconds.inc(computed.seconds * num_tokens / sum(computed.num_tokens))

    def count(self, completion: Completion, num_answer_tokens: int) -> None:
        """One ended request: the end of its last branch, and the tokens of all."""
        self.requests.labels(completion.finish_reason).inc()
        self.prompt_tokens.inc(completion.num_prompt_tokens)
        self.answer_tokens.inc(num_answer_tokens)
        for tier, num_tokens in completion.cached_by_tier.items():
            self.cached_tokens.labels(tier).inc(num_tokens)
        if completion.ttft_s is not None:
            self.ttft_seconds.observe(completion.ttft_s)
            if not any(completion.cached_by_tier.values()):
                self.cold_ttft_seconds.observe(completion.ttft_s)
