"""What a Redis says of its memory: how full it is, and whether it makes room by itself."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.errors import InvalidInputError
from kvtier.tiers.base import Usage

REPORT = (("DBSIZE",), ("INFO", "memory"))
"""CONFIG would tell as well, but is forbidden where somebody else runs the server; INFO is not."""


@dataclass(frozen=True, slots=True)
class ServerMemory:
    """What one server says."""

    num_keys: int
    used_bytes: int
    """The bytes that keys and values take, the allocator's rounding included."""
    max_bytes: int
    """0: no limit."""
    policy: str
    """`maxmemory-policy`."""

    @classmethod
    def parse(cls, answers: Sequence[object]) -> "ServerMemory":
        """Reads the answers to `REPORT`."""
        num_keys, info = answers
        if not isinstance(num_keys, int) or not isinstance(info, bytes):
            raise InvalidInputError("the Redis answers DBSIZE and INFO with something else")
        fields = dict(line.split(":", 1) for line in info.decode(errors="replace").splitlines() if ":" in line)
        try:
            used_bytes = int(fields.get("used_memory_dataset", fields["used_memory"])) if num_keys else 0
            return cls(num_keys, used_bytes, int(fields.get("maxmemory", "0")), fields.get("maxmemory_policy", ""))
        except (KeyError, ValueError) as error:
            raise InvalidInputError(f"INFO of the Redis lacks or garbles a field: {error}") from None

    def warning(self, *, ttl: bool) -> str | None:
        """What will go wrong with these settings, and what to set.

        :param ttl: whether keys are written with a time to live.
        """
        remedy = "set `maxmemory`, and `maxmemory-policy` to allkeys-lru"
        if not self.max_bytes:
            return f"has no `maxmemory` and will grow until the machine has no memory left: {remedy}"
        if self.policy == "noeviction":
            return f"will refuse writes when it is full, because `maxmemory-policy` is noeviction: {remedy}"
        if self.policy.startswith("volatile-") and not ttl:
            return f"evicts only keys with a time to live, and `ttl_s` is 0: {remedy}, or set `ttl_s`"
        return None


def total(servers: Sequence[ServerMemory]) -> Usage:
    """The sum of all servers; if one has no limit, there is none."""
    unlimited = any(not server.max_bytes for server in servers)
    return Usage(
        num_blocks=sum(server.num_keys for server in servers),
        used_bytes=sum(server.used_bytes for server in servers),
        capacity_bytes=0 if unlimited else sum(server.max_bytes for server in servers),
    )
