"""The directory and the pool of an engine, which are opened when the workers have said what their KV is."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvtier.build.engine_cache import directory_half
from kvtier.build.tiers import shared_tier
from kvtier.config import Config
from kvtier.errors import ConfigError
from kvtier.identity.keys import BlockHasher, NamespaceId
from kvtier.metrics import Metrics
from kvtier.offload import Directory, PrefixTokens
from kvtier.offload.messages import decode
from kvtier_vllm.messages import WorkerIdentity
from kvtier_vllm.requests.pins import Pins
from kvtier_vllm.weights.engine_weights import EngineWeights


@dataclass(frozen=True, slots=True)
class OpenedCache:
    """Scheduler thread only."""

    directory: Directory
    hashers: Mapping[str, BlockHasher]
    """The hasher of each tenant, by its name."""
    pins: Pins | None
    """Pins of blocks in the pool. None where there is no pool."""
    weights: EngineWeights
    tokens: PrefixTokens


def open_cache(
    config: Config, identities: Sequence[WorkerIdentity], metrics: Metrics, stack: contextlib.ExitStack
) -> OpenedCache:
    """Opens directory and pool for these workers. Raises `ConfigError`.

    :param identities: what the workers say of their KV, in rank order.
    :param metrics: of what is opened here.
    :param stack: closes what is opened here.
    """
    sizes = {identity.block_bytes for identity in identities}
    if len(sizes) != 1:
        raise ConfigError(f"blocks of {sorted(sizes)} bytes in the ranks of one engine: they must be equal")
    namespaces = [NamespaceId(identity.namespace) for identity in identities]
    shared = stack.enter_context(shared_tier(config, namespaces, metrics))
    half = directory_half(
        config if all(identity.has_direct_loads for identity in identities) else config.without_direct_loads(),
        namespaces=namespaces,
        block_bytes=sizes.pop(),
        shared=shared.tier if shared is not None else None,
        metrics=metrics,
    )
    pins: Pins | None = None
    if shared is not None:
        pins = Pins(shared.pin, list(dict.fromkeys(namespaces)))
        stack.callback(pins.close)
    stack.callback(half.directory.close)
    for rank, identity in enumerate(identities):
        half.directory.deliver(rank, map(decode, identity.messages))
    return OpenedCache(half.directory, half.hashers, pins, EngineWeights(namespaces), half.metrics.prefix)
