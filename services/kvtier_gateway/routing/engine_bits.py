"""Engines as bits of integers, so that one dictionary says of a block which engines have it."""

from collections.abc import Iterator

from kvtier_gateway.routing.values import EngineId


class EngineBits:
    """Gives every engine a bit. The old bit of one that left or was cleared means nothing any more."""

    def __init__(self) -> None:
        self._bits: dict[EngineId, int] = {}
        self._next = 0
        self.live = 0
        """The bits that mean something."""

    def bit(self, engine: EngineId) -> int:
        """The engine's bit, given now if it has none."""
        if engine not in self._bits:
            self._bits[engine] = 1 << self._next
            self.live |= 1 << self._next
            self._next += 1
        return self._bits[engine]

    def retire(self, engine: EngineId) -> None:
        """Whatever has the engine's bit is not its any more."""
        self.live &= ~self._bits.pop(engine, 0)

    @property
    def num_retired(self) -> int:
        """Bits that were given and mean nothing any more."""
        return self._next - len(self._bits)

    def renumber(self) -> dict[int, int]:
        """Gives live engines the lowest bits. From old bits to new ones, for the owner of what has the old."""
        moved = {}
        for i, (engine, old) in enumerate(self._bits.items()):
            moved[old] = self._bits[engine] = 1 << i
        self._next = len(self._bits)
        self.live = (1 << self._next) - 1
        return moved


def each_bit(mask: int) -> Iterator[int]:
    """The bits that are set, lowest first."""
    while mask:
        low = mask & -mask
        yield low
        mask ^= low
