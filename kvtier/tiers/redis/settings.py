"""What may be set of a redis tier."""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvtier.codec.sealed_form import NO_SEALS, StorageSeals
from kvtier.codec.stored_form import Codec
from kvtier.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisSettings:
    """Logins, deadlines and sizes of a redis tier.

    :raises ConfigError: a value is out of range.
    """

    username: str | None = None
    """The name of the user in the server's ACL; None for its default user."""
    password: str | None = field(default=None, repr=False)
    """Never logged nor part of an error. A Sentinel is told it too."""
    newest_password: Callable[[], str] | None = field(default=None, repr=False)
    """Returns the password that new connections are made with; any thread. None: always `password`."""
    ttl_s: float = 0.0
    """Seconds that a block lives after its last read or write, to the millisecond; 0 for ever. Makes reads into writes
    of the server's: they go to its replicas and its log, a few bytes each."""
    codec: Codec = Codec.RAW
    """How payloads are packed on their way. Blocks of any codec are read."""
    seals: StorageSeals = NO_SEALS
    """The tenants whose blocks are sealed. What cannot be opened is a miss, and dropped unless its key is newer."""
    call_timeout_s: float = 5.0
    """Seconds that each call of a verb may take."""
    lookup_timeout_s: float = 5.0
    """Seconds that a lookup may take, which somebody else's answer may be waiting for; at most `call_timeout_s`."""
    connect_timeout_s: float = 1.0
    """Seconds of that for connecting to a server."""
    max_value_bytes: int = 4 << 20
    """Payload bytes in one value; the same for all who share the server. Allocators on both sides fall off a cliff with
    larger ones."""
    max_batch_bytes: int = 16 << 20
    """Payload bytes in one pipeline: what a server holds at most for one call that reads. It takes that from
    `maxmemory`, so a small server evicts for a large pipeline."""

    def __post_init__(self) -> None:
        for name, value in (("call_timeout_s", self.call_timeout_s), ("connect_timeout_s", self.connect_timeout_s)):
            if not value > 0:
                raise ConfigError(f"redis tier with {name} {value}: set it above 0")
        if not self.ttl_s >= 0:
            raise ConfigError(f"redis tier with ttl_s {self.ttl_s}: set it to 0 or more")
        if self.max_value_bytes < 1:
            raise ConfigError(f"redis tier with max_value_bytes {self.max_value_bytes}: set it to 1 or more")
