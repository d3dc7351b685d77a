"""Blocks that the tiers of a tier process lend to the engine: the process's end. See `kvtier.tiers.lease`.

The engine maps slabs of the tier by descriptors that come by way of this process, and tells which of them are ready.
"""

import itertools
import secrets
import threading
from collections.abc import Mapping, Sequence

from kvtier.errors import KvtierError
from kvtier.identity.keys import StoreKey
from kvtier.memory.slab_layout import SharedSlab
from kvtier.tiers.base import Tier
from kvtier.tiers.lease import Lease, LeasingTier, MappableSlab, SlotRef
from kvtier.tiers.sidecar.messages import NO_SLAB, PLACE_FIELDS, pack_numbers

NO_LEASE = 0
"""Id of what lends nothing."""
_NOTHING = {"lease": NO_LEASE, "not_ready": b""}
_NOWHERE = SlotRef(NO_SLAB, 0, 0, 0)
_SHARE_S = 1.0
"""Seconds that a descriptor of a slab may take to be had."""


class LeaseTable:
    """Loans and slabs of all tiers of this process. Any thread."""

    def __init__(self) -> None:
        # Unlike those of the process before: the engine may still tell that its loans are over.
        self._ids = itertools.count(NO_LEASE + 1 + secrets.randbits(62))
        self._lock = threading.Lock()
        self._leases: dict[int, Lease] = {}
        """The loans by id. Guarded by _lock."""
        self._slabs: dict[int, MappableSlab] = {}
        """The slabs that the engine was told of, by serial number. Guarded by _lock."""
        self._ready: set[int] = set()
        """Serial numbers of the slabs that the engine has mapped. Replaced under _lock, not changed."""

    def lease(
        self, tier: Tier, keys: Sequence[StoreKey], nbytes: int, *, verified: bool = True
    ) -> Mapping[str, object]:
        """Id of the loan, the place of each block, until when it holds, and slabs that are worth mapping.

        :param verified: see `LeasingTier.lease`.
        """
        if not isinstance(tier, LeasingTier):
            return _NOTHING
        lease = tier.lease(keys, nbytes, self._ready, verified=verified)
        if lease is None:
            return _NOTHING
        with self._lock:
            self._slabs.update(lease.not_ready)
        not_ready = pack_numbers(list(lease.not_ready))
        if not any(lease.places):
            lease.release()
            return {**_NOTHING, "not_ready": not_ready}
        with self._lock:
            lease_id = next(self._ids)
            self._leases[lease_id] = lease
        columns = map(pack_numbers, zip(*(place or _NOWHERE for place in lease.places), strict=True))
        return {
            "lease": lease_id,
            "held_until_ms": int(lease.held_until_s * 1000),
            **dict(zip(PLACE_FIELDS, columns, strict=True)),
            "not_ready": not_ready,
        }

    def release(self, lease_ids: Sequence[int]) -> None:
        """Ends these loans, but for those of another process, which ended with it."""
        with self._lock:
            leases = [self._leases.pop(lease_id) for lease_id in lease_ids if lease_id in self._leases]
        for lease in leases:
            lease.release()

    def share(self, serial: int) -> SharedSlab | None:
        """A slab for the engine to map; None: it is gone, or cannot be had now."""
        with self._lock:
            slab = self._slabs.get(serial)
        try:
            return slab.share(_SHARE_S) if slab is not None else None
        except (OSError, KvtierError):
            return None  # asked for again by the next reader that wants a block of it

    def note_mapped(self, serials: Sequence[int]) -> list[int]:
        """Takes these for the slabs that the engine has mapped; returns those of them that it should unmap.

        What has ended is not lent any more, nor known.
        """
        with self._lock:
            for serial in [serial for serial, slab in self._slabs.items() if slab.has_ended]:
                del self._slabs[serial]
            self._ready = self._slabs.keys() & set(serials)
            return [serial for serial in serials if serial not in self._slabs]
