"""What a mover's own tiers hold, on its way to the directory's index."""

import threading

from kvtier.events import Event, EventKind
from kvtier.hierarchy.messages import Inventory
from kvtier.keys import NamespaceId, TenantId


class InventoryLog:
    """Gathers the events of a worker's own tiers. Give `on_event` to the tiers and the log to the mover.

    Any thread; `on_event` does not block.
    """

    def __init__(self, tenant: TenantId, namespace: NamespaceId) -> None:
        self._prefix = tenant + namespace
        self._lock = threading.Lock()
        self._changes: dict[str, dict[bytes, bool]] = {}  # guarded by _lock; by tier and hash; True: is there
        self._cleared: set[str] = set()  # guarded by _lock

    def on_event(self, event: Event) -> None:
        """Notes a change. Keys of other tenants and namespaces are not this worker's."""
        with self._lock:
            changes = self._changes.setdefault(event.tier, {})
            if event.kind is EventKind.CLEARED:
                changes.clear()
                self._cleared.add(event.tier)
            for key in event.keys:
                if key.startswith(self._prefix):
                    changes[key[len(self._prefix) :]] = event.kind is EventKind.STORED

    def drain(self) -> list[Inventory]:
        """The changes since the last call, one message per tier that has any."""
        with self._lock:
            changes, self._changes = self._changes, {}
            cleared, self._cleared = self._cleared, set()
        return [
            Inventory(
                tier,
                tier in cleared,
                added=[chain_hash for chain_hash, there in hashes.items() if there],
                removed=[chain_hash for chain_hash, there in hashes.items() if not there],
            )
            for tier, hashes in changes.items()
            if hashes or tier in cleared
        ]
