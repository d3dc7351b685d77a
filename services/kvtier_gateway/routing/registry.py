"""Strategies by the names that configurations give them."""

from collections.abc import Callable, Mapping

from kvtier.errors import ConfigError
from kvtier_gateway.routing.least_loaded import LeastLoaded
from kvtier_gateway.routing.round_robin import RoundRobin
from kvtier_gateway.routing.strategy import Strategy

STRATEGIES: Mapping[str, Callable[[int], Strategy]] = {
    "round_robin": lambda seed: RoundRobin(),
    "least_loaded": LeastLoaded,
}
"""Makes a strategy with its published parameters from a seed for what it draws at random."""


def make_strategy(name: str, seed: int = 0) -> Strategy:
    """A new strategy.

    :raises ConfigError: there is none of this name.
    """
    if name not in STRATEGIES:
        raise ConfigError(f"strategy {name!r} is none: name one of {', '.join(STRATEGIES)}")
    return STRATEGIES[name](seed)
