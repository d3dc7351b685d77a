"""Commands as they go over the wire to a Redis, names of keys included. Packed by hand: no copy of a payload."""

from collections.abc import Sequence

from kvtier.identity.keys import NAMESPACE_ID_BYTES, TENANT_ID_BYTES, StoreKey
from kvtier.memory.buffers import ReadableBuffer

MAX_PARTS = 1024
"""That are looked for, of one block: its length may be garbled."""
_SCOPE = TENANT_ID_BYTES + NAMESPACE_ID_BYTES


def key_name(key: StoreKey) -> bytes:
    """`kvt1:TENANT:NAMESPACE:HASH` in lower-case hex. Without braces, so that a Cluster spreads by all of it."""
    return f"kvt1:{key[:_SCOPE].hex(':', TENANT_ID_BYTES)}:{key[_SCOPE:].hex()}".encode()


def part_names(name: bytes, checksum: int, num_parts: int) -> list[bytes]:
    """Where the parts after the first of a large block lie.

    The checksum of all of it is in their names: parts of different bytes never meet, whoever writes them when.
    """
    return [b"%b:%016x:%d" % (name, checksum, part) for part in range(1, num_parts)]


def command(*words: bytes) -> bytes:
    """One command of short words. Five times slower than those below, which come in thousands."""
    head = b"*%d\r\n" % len(words)
    return head + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def exists(name: bytes) -> bytes:
    """1 or 0. Does not count as a use."""
    return b"*2\r\n$6\r\nEXISTS\r\n$%d\r\n%b\r\n" % (len(name), name)


def get(name: bytes, ttl_ms: int) -> bytes:
    """The value, which lives on for `ttl_ms` if that is not 0."""
    if not ttl_ms:
        return b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name)
    ttl = b"%d" % ttl_ms
    return b"*4\r\n$5\r\nGETEX\r\n$%d\r\n%b\r\n$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(name), name, len(ttl), ttl)


def set_value(name: bytes, value: Sequence[ReadableBuffer], ttl_ms: int, *, anew: bool) -> list[ReadableBuffer]:
    """Stores `value`, one part after the other.

    :param anew: only if the name is free.
    """
    options = [b"PX", b"%d" % ttl_ms] if ttl_ms else []
    if anew:
        options.append(b"NX")
    head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (3 + len(options), len(name), name, sum(map(len, value)))
    tail = b"\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(option), option) for option in options)
    return [head, *value, tail]
