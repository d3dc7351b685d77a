"""Memory beside that of the memory tier, for blocks that are read from below while the memory tier has no room."""

import threading

from kvtier.identity.keys import TenantId
from kvtier.store.fair_room import FairRoom


class PrivateBuffer:
    """Room for one payload, until `release`."""

    def __init__(self, owner: "PrivateBuffers", tenant: TenantId, nbytes: int) -> None:
        self.view = memoryview(bytearray(nbytes))
        """The room, of as many bytes as were asked for."""
        self._owner: PrivateBuffers | None = owner
        self._tenant = tenant

    def release(self) -> None:
        """Stops counting the bytes. Idempotent; one thread at a time. Whoever has the view must not use it any more."""
        owner, self._owner = self._owner, None
        if owner is not None:
            owner._give_back(self._tenant, len(self.view))


class PrivateBuffers:
    """All such buffers of a store, bounded, and shared by tenants as `FairRoom` does. Any thread."""

    def __init__(self, most_bytes: int) -> None:
        """:param most_bytes: for a tenant that is alone; all together have twice as much at most, and a block more of
        each tenant, as each has a block at least."""
        self._room = FairRoom(most_bytes)
        """Guarded by _lock."""
        self._lock = threading.Lock()

    def take(self, tenant: TenantId, nbytes: int) -> PrivateBuffer | None:
        """A buffer for a payload of the tenant; None while it has as much as it may have. The caller releases it."""
        with self._lock:
            if self._room.taken_by(tenant) and not self._room.fits(tenant, nbytes):
                return None
            self._room.add(tenant, nbytes)
        try:
            return PrivateBuffer(self, tenant, nbytes)
        except MemoryError:
            self._give_back(tenant, nbytes)
            return None

    def taken_by(self, tenant: TenantId) -> int:
        """Bytes of the tenant's buffers."""
        with self._lock:
            return self._room.taken_by(tenant)

    def _give_back(self, tenant: TenantId, nbytes: int) -> None:
        with self._lock:
            self._room.add(tenant, -nbytes)
