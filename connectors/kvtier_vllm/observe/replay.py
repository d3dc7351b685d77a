"""Observations that give a histogram what another one, in another process, has gained."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

SUM, REST = "sum", "+Inf"
_LEAST = 1e-6
"""A bucket's lower bound is not in it."""


def replay(observe: Callable[[float], object], bounds: Sequence[float], gains: Mapping[str, float]) -> None:
    """Observes as many values in each bucket as it has gained, chosen so that they add up to what the sum has gained.

    All of them lie at the same part of the way through their buckets. The sum is exact but for what was beyond the
    last bound.

    :param bounds: upper bounds of the buckets but the last, which has none.
    :param gains: by upper bound, as Prometheus writes it, and of `SUM`.
    """
    edges = [0.0, *bounds, max(2 * bounds[-1], gains.get(SUM, 0.0))]
    counts = [round(gains.get(le, 0)) for le in [*map(_written, bounds), REST]]
    buckets = [(low, high, count) for (low, high), count in zip(pairwise(edges), counts, strict=True) if count]
    least = sum(low * count for low, _, count in buckets)
    width = sum((high - low) * count for low, high, count in buckets)
    part = min(1.0, max(_LEAST, (gains.get(SUM, 0.0) - least) / width)) if width else 1.0
    for low, high, count in buckets:
        for _ in range(count):
            observe(low + part * (high - low))


def _written(bound: float) -> str:
    """The kind as `prometheus_client` writes it."""
    return repr(float(bound))
