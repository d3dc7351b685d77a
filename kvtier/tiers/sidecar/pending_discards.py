"""What must be forgotten although no tier process answers: kept by the engine, told to the next process.

A folder outlives the process that kept it, and the next process finds in it whatever the last one was not told to
forget. So a process tells of its tiers' content, and serves, only when it has forgotten what is owed.
"""

from collections.abc import Collection, Mapping

from kvtier.events import Event, EventKind, EventSink
from kvtier.identity.keys import StoreKey


class PendingDiscards:
    """Blocks to be forgotten, by tier. The caller guards it."""

    def __init__(self) -> None:
        self._keys: dict[str, set[StoreKey]] = {}
        self._prefixes: dict[str, set[bytes]] = {}

    def __bool__(self) -> bool:
        return bool(self._keys or self._prefixes)

    def add(self, tier: str, keys: Collection[StoreKey]) -> None:
        """These blocks, whether the tier has them or not."""
        self._keys.setdefault(tier, set()).update(keys)

    def add_prefix(self, tier: str, prefix: bytes) -> None:
        """All blocks of the tier whose keys begin so: nobody can name them while their process is gone."""
        self._prefixes.setdefault(tier, set()).add(prefix)

    def merge(self, other: "PendingDiscards") -> None:
        """Takes in all that `other` has."""
        for tier, keys in other._keys.items():
            self.add(tier, keys)
        for tier, prefixes in other._prefixes.items():
            for prefix in prefixes:
                self.add_prefix(tier, prefix)

    def of(self, held: Mapping[str, Collection[StoreKey]]) -> dict[str, list[StoreKey]]:
        """The keys by tier, where tiers hold what `held` says."""
        found: dict[str, list[StoreKey]] = {}
        for tier in self._keys.keys() | self._prefixes.keys():
            prefixes = tuple(self._prefixes.get(tier, ()))
            begun = {key for key in held.get(tier, ()) if key.startswith(prefixes)}
            found[tier] = sorted(self._keys.get(tier, set()) | begun)
        return found


class OpeningInventory:
    """What the tiers of a new process hold; told to others by `tell`, and as it happens from then on.

    Its owner's thread alone until `end`; then one thread at a time.
    """

    def __init__(self, on_event: EventSink) -> None:
        self._on_event = on_event
        self.keys: dict[str, dict[StoreKey, None]] = {}
        """The keys of each tier, in the order of the events; kept until `end`."""
        self.told = False
        self._ended = False

    def on_event(self, event: Event) -> None:
        """Notes a change, or passes it on."""
        if not self._ended:
            keys = self.keys.setdefault(event.tier, {})
            if event.kind is EventKind.CLEARED:
                keys.clear()
            for key in event.keys:
                if event.kind is EventKind.STORED:
                    keys[key] = None
                else:
                    keys.pop(key, None)
        if self.told:
            self._on_event(event)

    def tell(self) -> None:
        """What is there now. Idempotent."""
        if not self.told:
            for tier, keys in self.keys.items():
                if keys:
                    self._on_event(Event(EventKind.STORED, tier, tuple(keys)))
        self.told = True

    def end(self) -> None:
        """The process serves: nobody asks for its keys any more."""
        self._ended = True
        self.keys = {}
