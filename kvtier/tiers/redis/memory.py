"""What a Redis says of its memory: how full it is, whether it makes room by itself, and whether it takes writes."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.errors import InvalidInputError
from kvtier.tiers.base import Usage

REPORT = (("DBSIZE",), ("INFO", "memory"), ("INFO", "replication"))
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
    is_replica: bool = False
    """Whether it follows another server and refuses writes."""

    @classmethod
    def parse(cls, answers: Sequence[object]) -> "ServerMemory":
        """Reads the answers to `REPORT`."""
        num_keys, *infos = answers
        if not isinstance(num_keys, int) or not all(isinstance(info, bytes) for info in infos):
            raise InvalidInputError("the Redis answers DBSIZE and INFO with something else")
        text = b"\n".join(info for info in infos if isinstance(info, bytes)).decode(errors="replace")
        fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        try:
            used_bytes = int(fields.get("used_memory_dataset", fields["used_memory"])) if num_keys else 0
            return cls(
                num_keys,
                used_bytes,
                int(fields.get("maxmemory", "0")),
                fields.get("maxmemory_policy", ""),
                is_replica=fields.get("role") == "slave" and fields.get("slave_read_only", "1") == "1",
            )
        except (KeyError, ValueError) as error:
            raise InvalidInputError(f"INFO of the Redis lacks or garbles a field: {error}") from None

    def warning(self, *, ttl: bool) -> str | None:
        """What will go wrong with these settings, and what to set.

        :param ttl: whether keys are written with a time to live.
        """
        if self.is_replica:
            return "is a replica, which takes no writes: name the server that it follows"
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
