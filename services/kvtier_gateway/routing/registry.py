"""Strategies by the names that configurations give them."""

from collections.abc import Callable, Mapping

from kvtier.errors import ConfigError
from kvtier_gateway.routing.chwbl import Chwbl
from kvtier_gateway.routing.epp import Epp
from kvtier_gateway.routing.hash_trie import HashTrie
from kvtier_gateway.routing.least_loaded import LeastLoaded
from kvtier_gateway.routing.precise import Dynamo, Precise
from kvtier_gateway.routing.priced import Priced
from kvtier_gateway.routing.radix import Radix
from kvtier_gateway.routing.round_robin import RoundRobin
from kvtier_gateway.routing.session import Session
from kvtier_gateway.routing.simhash import SimHash
from kvtier_gateway.routing.strategy import Strategy

STRATEGIES: Mapping[str, Callable[[int], Strategy]] = {
    "round_robin": lambda seed: RoundRobin(),
    "least_loaded": LeastLoaded,
    "session": Session,
    "chwbl": lambda seed: Chwbl(),
    "hash_trie": HashTrie,
    "simhash": SimHash,
    "radix": Radix,
    "epp": Epp,
    "precise": Precise,
    "dynamo": Dynamo,
    "priced": Priced,
}
"""Makes a strategy with its published parameters from a seed for what it draws at random."""


def make_strategy(name: str, seed: int = 0) -> Strategy:
    """Returns a new strategy.

    :raises ConfigError: there is none of this name.
    """
    if name not in STRATEGIES:
        raise ConfigError(f"strategy {name!r} is none: name one of {', '.join(STRATEGIES)}")
    return STRATEGIES[name](seed)
