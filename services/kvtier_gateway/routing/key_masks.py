"""A bounded map from keys to sets of engines."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat

from kvtier_gateway.routing.engine_bits import each_bit
from kvtier_gateway.routing.values import Key


class KeyMasks:
    """Maps at most `max_keys` keys to bits of engines, and forgets the keys that were not touched for longest.

    There are two dictionaries. When the young one holds half of what is allowed it becomes the old one, and what was
    old and not touched since is forgotten at once. That is O(1) for each key, and needs no links.
    """

    def __init__(self, max_keys: int) -> None:
        self._half = max(1, max_keys // 2)
        self._young: dict[Key, int] = {}
        self._old: dict[Key, int] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def get(self, key: Key) -> int:
        """Returns the bits of the key; 0: it has none."""
        return self._young.get(key) or self._old.get(key, 0)

    def get_all(self, keys: Sequence[Key]) -> list[int]:
        """Returns the bits of each key. About 0.04 µs each."""
        found = list(map(self._young.get, keys, repeat(0)))
        if self._old and not all(found):
            found = [mask or self._old.get(key, 0) for key, mask in zip(keys, found, strict=True)]
        return found

    def add(self, keys: Iterable[Key], bit: int) -> None:
        """Sets a bit of the keys, and touches them."""
        for key in keys:
            mask = self._young.get(key)
            if mask is None:
                self._make_young(key, self._old.pop(key, 0) | bit)
            elif not mask & bit:
                self._young[key] = mask | bit

    def touch(self, keys: Iterable[Key]) -> None:
        """Notes a use: keys that are known are forgotten after others."""
        if self._old:
            for key in keys:
                if (mask := self._old.pop(key, 0)) != 0:
                    self._make_young(key, mask)

    def remove(self, keys: Iterable[Key], bit: int) -> None:
        """Clears a bit of the keys."""
        for key in keys:
            for part in (self._young, self._old):
                mask = part.get(key, 0)
                if mask == bit:
                    del part[key]
                elif mask & bit:
                    part[key] = mask & ~bit

    def renumber(self, moved: Mapping[int, int]) -> None:
        """Replaces bits by those given, and drops all others. O(keys)."""
        for part in (self._young, self._old):
            new: dict[int, int] = {}
            for key, mask in list(part.items()):
                if mask not in new:
                    new[mask] = sum(moved.get(bit, 0) for bit in each_bit(mask))
                if new[mask]:
                    part[key] = new[mask]
                else:
                    del part[key]

    def _make_young(self, key: Key, mask: int) -> None:
        if len(self._young) >= self._half:
            self._old, self._young = self._young, {}
        self._young[key] = mask
