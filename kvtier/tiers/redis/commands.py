"""Commands to a Redis as redis-py takes them, and the names of keys."""

from collections.abc import Sequence

import numpy as np

from kvtier.identity.keys import (
    CHAIN_HASH_BYTES,
    NAMESPACE_ID_BYTES,
    NUMPY_PAYS_FROM,
    TENANT_ID_BYTES,
    StoreKey,
    TenantId,
)

Command = tuple[str | bytes | int, ...]
"""The words of one command."""

MAX_PARTS = 1024
"""The most parts of one block that are looked for: the length in its header may be garbled."""
_SCOPE = TENANT_ID_BYTES + NAMESPACE_ID_BYTES
_PREFIX = b"kvt1:"
_TENANT_AT = len(_PREFIX)
_NAMESPACE_AT = _TENANT_AT + 2 * TENANT_ID_BYTES + 1
_HASH_AT = _NAMESPACE_AT + 2 * NAMESPACE_ID_BYTES + 1
"""The places at which the parts of a name begin."""


def key_name(key: StoreKey) -> bytes:
    """`kvt1:TENANT:NAMESPACE:HASH` in lower-case hex. Without braces, so that a Cluster spreads by all of it."""
    return f"kvt1:{key[:_SCOPE].hex(':', TENANT_ID_BYTES)}:{key[_SCOPE:].hex()}".encode()


def key_names(keys: Sequence[StoreKey]) -> list[bytes]:
    """`key_name` of each, about 0.1 us per key of many."""
    if len(keys) < NUMPY_PAYS_FROM:
        return [key_name(key) for key in keys]
    digits = np.frombuffer(b"".join(keys).hex().encode(), dtype=np.uint8).reshape(len(keys), -1)
    names = np.empty((len(keys), _NAMESPACE_AT + 2 * (NAMESPACE_ID_BYTES + CHAIN_HASH_BYTES) + 1), dtype=np.uint8)
    names[:, :_TENANT_AT] = np.frombuffer(_PREFIX, dtype=np.uint8)
    names[:, _NAMESPACE_AT - 1] = names[:, _HASH_AT - 1] = ord(":")
    names[:, _TENANT_AT : _NAMESPACE_AT - 1] = digits[:, : 2 * TENANT_ID_BYTES]
    names[:, _NAMESPACE_AT : _HASH_AT - 1] = digits[:, 2 * TENANT_ID_BYTES : 2 * _SCOPE]
    names[:, _HASH_AT:] = digits[:, 2 * _SCOPE :]
    listed: list[bytes] = names.view(f"V{names.shape[1]}").ravel().tolist()
    return listed


def tenant_prefix(tenant: TenantId) -> bytes:
    """How the names of all values of a tenant's blocks begin, and no others."""
    return f"kvt1:{tenant.hex()}:".encode()


def part_names(name: bytes, fingerprint: int, num_parts: int) -> list[bytes]:
    """Returns where the parts after the first of a large block lie.

    The `Header.fingerprint` of the whole block is in their names: parts of different bytes never meet, whoever writes
    them when.
    """
    return [b"%b:%016x:%d" % (name, fingerprint, part) for part in range(1, num_parts)]


def get(name: bytes, ttl_ms: int) -> Command:
    """Asks for the value, which lives on for `ttl_ms` if that is not 0."""
    return ("GETEX", name, "PX", ttl_ms) if ttl_ms else ("GET", name)


def set_value(name: bytes, value: bytes, ttl_ms: int, *, anew: bool) -> Command:
    """Stores `value`; with `anew`, only if the name is free."""
    return ("SET", name, value, *(("PX", ttl_ms) if ttl_ms else ()), *(("NX",) if anew else ()))
