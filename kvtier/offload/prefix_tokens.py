"""What requests asked the tiers below the device for, in tokens, and what came of it."""

from collections import Counter as Counts
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter


class PrefixTokens:
    """Counters of tokens that all engines have alike. Any thread. What the device itself has is not in them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Registers the counters."""

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"kvtier_{name}_tokens", text, labels, registry=registry)

        self.requested = counter("requested", "Prompt tokens that requests asked the tiers below the device for")
        self.hit = counter("hit", "Of these, tokens that a tier had, from the first one on without a gap", "tier")
        self.fetched = counter("fetched", "Of these, tokens whose KV was brought to where it is used", "tier")
        self.recomputed = counter(
            "recomputed",
            "Tokens that a tier had and that were computed all the same: fetching was expected to take longer "
            "(slower), or did not bring them (failed)",
            "reason",
        )
        for reason in ("slower", "failed"):
            self.recomputed.labels(reason)

    def begin(self, tiers: Iterable[str]) -> None:
        """Makes the samples of these tiers, so that they read 0 before anything happened."""
        for tier in tiers:
            self.hit.labels(tier)
            self.fetched.labels(tier)

    def note_lookup(self, num_asked: int, tiers: Sequence[str], num_wanted: int, tokens_per_block: int) -> None:
        """Counts what a request has asked for, and what it will load.

        :param num_asked: blocks that it asked for.
        :param tiers: the tier of each leading block that was found.
        :param num_wanted: how many of these will be fetched.
        """
        self.requested.inc(num_asked * tokens_per_block)
        for tier, num_blocks in Counts(tiers).items():
            self.hit.labels(tier).inc(num_blocks * tokens_per_block)
        self.recomputed.labels("slower").inc(max(0, len(tiers) - num_wanted) * tokens_per_block)

    def note_load(self, tiers: Sequence[str], num_good: int, tokens_per_block: int) -> None:
        """Counts what a load has brought, at its end.

        :param tiers: where each of its blocks was.
        :param num_good: how many of them, from the first one on, are there now and used.
        """
        for tier, num_blocks in Counts(tiers[:num_good]).items():
            self.fetched.labels(tier).inc(num_blocks * tokens_per_block)
        self.recomputed.labels("failed").inc((len(tiers) - num_good) * tokens_per_block)
