"""What an engine says of its keys, for a gateway that asks a pool for the same blocks."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Gauge

from kvtier.identity.keys import NamespaceId


def describe_keys(registry: CollectorRegistry, namespaces: Iterable[NamespaceId], tokens_per_block: int) -> Gauge:
    """Adds `kvtier_namespace_info`, with a sample for each namespace that a hit of the engine needs."""
    gauge = Gauge(
        "kvtier_namespace_info",
        "1, for each namespace that a hit needs, with its id in hex and the tokens of a block",
        ["namespace", "tokens_per_block"],
        registry=registry,
    )
    for namespace in dict.fromkeys(namespaces):
        gauge.labels(namespace.hex(), str(tokens_per_block)).set(1)
    return gauge
