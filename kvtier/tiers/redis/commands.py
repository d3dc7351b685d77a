"""Commands to a Redis as redis-py takes them, and the names of keys."""

from kvtier.identity.keys import NAMESPACE_ID_BYTES, TENANT_ID_BYTES, StoreKey, TenantId

Command = tuple[str | bytes | int, ...]
"""The words of one command."""

MAX_PARTS = 1024
"""The most parts of one block that are looked for: the length in its header may be garbled."""
_SCOPE = TENANT_ID_BYTES + NAMESPACE_ID_BYTES


def key_name(key: StoreKey) -> bytes:
    """`kvt1:TENANT:NAMESPACE:HASH` in lower-case hex. Without braces, so that a Cluster spreads by all of it."""
    return f"kvt1:{key[:_SCOPE].hex(':', TENANT_ID_BYTES)}:{key[_SCOPE:].hex()}".encode()


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
