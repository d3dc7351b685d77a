"""What a mover's own tiers hold, on its way to the directory's index."""

import threading
from collections.abc import Iterable

from kvtier.events import Event, EventKind
from kvtier.identity.keys import NAMESPACE_ID_BYTES, TENANT_ID_BYTES, NamespaceId, TenantId
from kvtier.offload.messages import Inventory

_PREFIX_BYTES = TENANT_ID_BYTES + NAMESPACE_ID_BYTES
"""The bytes of a store key before its chain hash: the tenant, and the namespace."""


class InventoryLog:
    """Gathers the events of a worker's own tiers. Give `on_event` to the tiers and the log to the mover.

    Any thread; `on_event` does not block.
    """

    def __init__(self, tenants: Iterable[TenantId], namespace: NamespaceId) -> None:
        """:param tenants: all whose blocks the worker may have."""
        self._prefixes = frozenset(tenant + namespace for tenant in tenants)
        self._lock = threading.Lock()
        self._changes: dict[str, dict[bytes, bool]] = {}  # guarded by _lock; by tier and key; True: is there
        self._cleared: set[str] = set()  # guarded by _lock

    def on_event(self, event: Event) -> None:
        """Notes a change. Keys of other tenants and namespaces are not this worker's."""
        with self._lock:
            changes = self._changes.setdefault(event.tier, {})
            if event.kind is EventKind.CLEARED:
                changes.clear()
                self._cleared.add(event.tier)
            for key in event.keys:
                if key[:_PREFIX_BYTES] in self._prefixes:
                    changes[key[:TENANT_ID_BYTES] + key[_PREFIX_BYTES:]] = event.kind is EventKind.STORED

    def drain(self) -> list[Inventory]:
        """Returns the changes since the last call, one message per tier that has any."""
        with self._lock:
            changes, self._changes = self._changes, {}
            cleared, self._cleared = self._cleared, set()
        return [
            Inventory(
                tier,
                tier in cleared,
                added=[key for key, there in keys.items() if there],
                removed=[key for key, there in keys.items() if not there],
            )
            for tier, keys in changes.items()
            if keys or tier in cleared
        ]
