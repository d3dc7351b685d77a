"""The tenant that the requests of a connection act for, and which blocks they may name."""

from collections.abc import Iterable

from kvtier.errors import InvalidInputError
from kvtier.identity.keys import NAMESPACE_ID_BYTES, StoreKey, TenantId
from kvtier.protocol.arriving import CHECKSUM
from kvtier.protocol.block import Fields
from kvtier_pool.block.announced import AnnouncedBlocks
from kvtier_pool.limits import PoolLimits
from kvtier_pool.requests import add_keys, require_blocks, require_bytes, require_room


class ClientScope:
    """A peer of the block protocol that has said hello. Immutable: any thread.

    What it asks for is checked here: `InvalidInputError` for what makes no sense or names a namespace that HELLO should
    have named, `LimitExceededError` for too much. Keys are of its tenant, whatever it sends.
    """

    def __init__(self, tenant: TenantId, hello: Fields, limits: PoolLimits) -> None:
        """:param hello: may name all namespaces that will be used."""
        self.tenant = tenant
        self._namespaces = _namespaces_of(hello)
        """None: any."""
        self._limits = limits

    def keys(self, request: Fields) -> list[StoreKey]:
        """Returns the keys of the request's groups."""
        keys: list[StoreKey] = []
        for group in request.maps("groups"):
            self._add_keys(keys, group)
        return keys

    def blocks(self, request: Fields) -> tuple[list[StoreKey], list[int]]:
        """Keys and payload lengths of its groups."""
        keys: list[StoreKey] = []
        sizes: list[int] = []
        for group in request.maps("groups"):
            self._add_keys(keys, group)
            sizes += [group.number("payload_bytes")] * (len(keys) - len(sizes))
        require_room(sizes, self._limits)
        return keys, sizes

    def announced(self, request: Fields, payload_bytes: int) -> AnnouncedBlocks:
        """Stored-form headers of the blocks in a payload of so many bytes, with their checksums behind them where the
        request says so. Their tenant is as it was sent."""
        blocks = AnnouncedBlocks(request.data("headers"))
        if self._namespaces is not None:
            self._require_named(blocks.namespaces())
        require_blocks(len(blocks.sizes), self._limits)
        require_bytes(payload_bytes, self._limits)
        announced = sum(blocks.sizes) + (CHECKSUM.size * len(blocks.sizes) if request.has("checksums_behind") else 0)
        if announced != payload_bytes:
            raise InvalidInputError(f"headers of {announced} payload bytes before a payload of {payload_bytes}")
        return blocks

    def _add_keys(self, keys: list[StoreKey], group: Fields) -> None:
        namespace = group.data("namespace")
        self._require_named((namespace,))
        add_keys(keys, self.tenant, namespace, group.data("hashes"), self._limits)

    def _require_named(self, namespaces: Iterable[bytes]) -> None:
        if self._namespaces is not None:
            for namespace in namespaces:
                if namespace not in self._namespaces:
                    raise InvalidInputError(f"namespace {namespace.hex()[:100]} is none of those that hello named")


def _namespaces_of(hello: Fields) -> frozenset[bytes] | None:
    """What HELLO names; None when it names nothing."""
    if not hello.has("namespaces"):
        return None
    named = hello.datas("namespaces")
    if any(len(namespace) != NAMESPACE_ID_BYTES for namespace in named):
        raise InvalidInputError(f"header: namespaces must hold ids of {NAMESPACE_ID_BYTES} bytes")
    return frozenset(named)
