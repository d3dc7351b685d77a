"""Engines as bits of integers, so that one dictionary says of a block which engines have it."""

from collections.abc import Iterator

from kvtier_gateway.routing.values import EngineId

_RETIRED_AT_MOST = 64


class EngineBits:
    """Gives every engine a bit. The old bit of one that left or was cleared means nothing any more."""

    def __init__(self) -> None:
        self._bits: dict[EngineId, int] = {}
        self._next = 0

    def bit(self, engine: EngineId) -> int:
        """The engine's bit, given now if it has none."""
        if engine not in self._bits:
            self._bits[engine] = 1 << self._next
            self._next += 1
        return self._bits[engine]

    def retire(self, engine: EngineId) -> None:
        """Whatever has the engine's bit is not its any more."""
        self._bits.pop(engine, None)

    @property
    def are_sparse(self) -> bool:
        """Whether so many bits mean nothing any more that it is time to renumber."""
        return self._next - len(self._bits) > _RETIRED_AT_MOST

    def renumber(self) -> dict[int, int]:
        """Gives live engines the lowest bits. From old bits to new ones, for the owner of what has the old."""
        moved = {}
        for i, (engine, old) in enumerate(self._bits.items()):
            moved[old] = self._bits[engine] = 1 << i
        self._next = len(self._bits)
        return moved


def each_bit(mask: int) -> Iterator[int]:
    """The bits that are set, lowest first."""
    while mask:
        low = mask & -mask
        yield low
        mask ^= low
