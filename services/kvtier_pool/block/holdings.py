"""What all connections of a tenant hold of shared memory together."""

import threading
from collections.abc import Callable

LEASE_ENTRY_BYTES = 128
"""What a block under a lease takes of the pool's process, beside its slot."""


class Holdings:
    """Bytes under leases and of slabs with prepared slots, of all connections of one tenant. Any thread."""

    def __init__(self, on_take: Callable[[], object]) -> None:
        """:param on_take: called, without a lock, when more is held than before."""
        self._on_take = on_take
        self._lock = threading.Lock()
        self._nbytes = 0
        """Guarded by _lock."""
        self.num_clients = 0
        """Connections that share it. Guarded by whoever keeps the holdings of all tenants."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is held."""
        return not self._nbytes

    def take(self, nbytes: int, most_bytes: int) -> bool:
        """Adds to what is held; False, and nothing changed, if it would then be more than `most_bytes`."""
        with self._lock:
            if self._nbytes + nbytes > most_bytes:
                return False
            self._nbytes += nbytes
        self._on_take()
        return True

    def give_back(self, nbytes: int) -> None:
        """Notes that so many bytes are no longer held."""
        with self._lock:
            self._nbytes -= nbytes
