"""How much of large requests a pool takes into memory at a time: a bound for each tenant, whatever its connections."""

import threading
from collections import Counter

from kvtier.errors import UnavailableError
from kvtier.identity.keys import TenantId


class LargeRequests:
    """Bytes of requests' headers that are in memory, by tenant. Any thread."""

    def __init__(self, most_bytes: int) -> None:
        """:param most_bytes: of all requests of one tenant; a single larger one is let in when there is no other."""
        self._most_bytes = most_bytes
        self._changed = threading.Condition()
        self._taken: Counter[TenantId] = Counter()
        """Bytes of each tenant, none of them 0. Guarded by _changed."""

    def take(self, tenant: TenantId, nbytes: int, timeout_s: float) -> None:
        """Waits for room, which `give_back` makes. `UnavailableError`: there is none in that time."""
        with self._changed:
            if not self._changed.wait_for(
                lambda: not self._taken[tenant] or self._taken[tenant] + nbytes <= self._most_bytes, timeout_s
            ):
                raise UnavailableError(
                    f"this tenant's connections have {self._taken[tenant]:,} bytes of large requests under way, and "
                    f"{self._most_bytes:,} is the most: name fewer blocks at a time, or use fewer connections"
                )
            self._taken[tenant] += nbytes

    def give_back(self, tenant: TenantId, nbytes: int) -> None:
        """A request is over."""
        with self._changed:
            self._taken[tenant] -= nbytes
            if not self._taken[tenant]:
                del self._taken[tenant]
            self._changed.notify_all()
