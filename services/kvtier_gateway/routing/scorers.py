"""Scores of candidates between 0 and 1, and their weighted sum, as the Gateway API's endpoint picker adds them up."""

import random
from collections.abc import Sequence

from kvtier_gateway.routing.values import Candidate, Choice

PREFIX_WEIGHT, QUEUE_WEIGHT, KV_WEIGHT = 3.0, 2.0, 2.0


def pick(prefix_scores: Sequence[float], candidates: Sequence[Candidate], source: random.Random) -> Choice:
    """Returns one of the highest sums, at random: 3 for the prefix, 2 for an empty queue, 2 for free KV memory."""
    queues = [candidate.load.waiting for candidate in candidates]
    longest, spread = max(queues), max(queues) - min(queues)
    scores = []
    for prefix, queue, candidate in zip(prefix_scores, queues, candidates, strict=True):
        emptiness = (longest - queue) / spread if spread else 1.0
        scores.append(
            PREFIX_WEIGHT * prefix + QUEUE_WEIGHT * emptiness + KV_WEIGHT * max(0.0, 1.0 - candidate.load.kv_use)
        )
    best = max(scores)
    chosen = source.choice([i for i, score in enumerate(scores) if score == best])
    return Choice(candidates[chosen].engine, "prefix" if prefix_scores[chosen] > 0 else "load")
