"""The tenant that the requests of a connection act for, and which blocks they may name."""

from collections.abc import Iterable

from kvtier.codec.stored_form import HEADER_BYTES, Header, parse_header
from kvtier.errors import CorruptBlockError, InvalidInputError
from kvtier.identity.keys import NAMESPACE_ID_BYTES, TENANT_ID_BYTES, StoreKey, TenantId
from kvtier.protocol.block import Fields
from kvtier_pool.limits import PoolLimits
from kvtier_pool.requests import add_keys, require_blocks, require_bytes, require_room

_NAMESPACE = slice(TENANT_ID_BYTES, TENANT_ID_BYTES + NAMESPACE_ID_BYTES)
"""The bytes of a store key that name its namespace."""


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

    def headers(self, request: Fields, payload_bytes: int) -> list[Header]:
        """Stored-form headers of the blocks in a payload of so many bytes. Their tenant is as it was sent."""
        headers = _parse_headers(request.data("headers"))
        self._require_named(header.key[_NAMESPACE] for header in headers)
        require_blocks(len(headers), self._limits)
        require_bytes(payload_bytes, self._limits)
        announced = sum(header.stored_length for header in headers)
        if announced != payload_bytes:
            raise InvalidInputError(f"headers of {announced} payload bytes before a payload of {payload_bytes}")
        return headers

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


def _parse_headers(data: bytes) -> list[Header]:
    """Concatenated stored-form headers. Without all of them nobody knows where a payload ends."""
    if len(data) % HEADER_BYTES:
        raise InvalidInputError(f"headers of {len(data)} bytes: need a multiple of {HEADER_BYTES}")
    try:
        return [parse_header(data[at : at + HEADER_BYTES]) for at in range(0, len(data), HEADER_BYTES)]
    except CorruptBlockError as error:
        raise InvalidInputError(f"a block's header: {error}") from error
