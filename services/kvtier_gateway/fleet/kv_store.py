"""Blocks that a simulated tier holds."""

from collections import OrderedDict
from collections.abc import Sequence

from kvtier_gateway.routing.values import Key


class LruStore:
    """Keys with the least recently used first: host memory, or the pool."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._keys: OrderedDict[Key, None] = OrderedDict()

    def run(self, keys: Sequence[Key], start: int = 0) -> int:
        """The end of the leading run of `keys` from `start` on."""
        held = self._keys
        while start < len(keys) and keys[start] in held:
            start += 1
        return start

    def put(self, keys: Sequence[Key]) -> tuple[list[Key], list[Key]]:
        """Uses or adds keys, the last first. What is new, and what was evicted for it."""
        held, added, evicted = self._keys, [], []
        for key in reversed(keys):
            if key in held:
                held.move_to_end(key)
            else:
                held[key] = None
                added.append(key)
        while len(held) > self._capacity:
            evicted.append(held.popitem(last=False)[0])
        return added, evicted

    def clear(self) -> None:
        """Forgets all."""
        self._keys.clear()


class DeviceStore:
    """Blocks on a device: some in use by requests, the others findable until their place is needed.

    Requests longer than the device take all of it.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._uses: dict[Key, int] = {}
        self._free: OrderedDict[Key, None] = OrderedDict()
        self._private = 0

    @property
    def use(self) -> float:
        """The share in use by requests."""
        return (len(self._uses) + self._private) / self._capacity

    def run(self, keys: Sequence[Key]) -> int:
        """How many leading blocks are here."""
        uses, free = self._uses, self._free
        for i, key in enumerate(keys):
            if key not in uses and key not in free:
                return i
        return len(keys)

    def fits(self, num_blocks: int) -> bool:
        """Whether so many more can be in use."""
        used = len(self._uses) + self._private
        return used == 0 or used + num_blocks <= self._capacity

    def hold(self, keys: Sequence[Key], num_private: int) -> list[Key]:
        """Takes into use what is here of `keys`, and places for `num_private` blocks. What was evicted for them."""
        for key in keys:
            self._free.pop(key, None)
            self._uses[key] = self._uses.get(key, 0) + 1
        self._private += num_private
        return self._make_room()

    def fill(self, keys: Sequence[Key]) -> tuple[list[Key], list[Key]]:
        """Private places become blocks that others find. What is new, and what was evicted."""
        new = [key for key in keys if key not in self._uses and key not in self._free]
        return new, self.hold(keys, -len(keys))

    def release(self, keys: Sequence[Key], num_private: int) -> None:
        """Ends the use, the last first."""
        self._private -= num_private
        for key in reversed(keys):
            if self._uses[key] == 1:
                del self._uses[key]
                self._free[key] = None
            else:
                self._uses[key] -= 1

    def _make_room(self) -> list[Key]:
        evicted = []
        while self._free and len(self._uses) + self._private + len(self._free) > self._capacity:
            evicted.append(self._free.popitem(last=False)[0])
        return evicted
