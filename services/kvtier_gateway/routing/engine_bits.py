"""Engines as bits of integers, so that one dictionary says of a block which engines have it."""

from collections.abc import Iterator

from kvtier_gateway.routing.values import EngineId

_RETIRED_AT_MOST = 64


class EngineBits:
    """Gives every engine a bit, which means nothing any more once the engine has left or was cleared."""

    def __init__(self) -> None:
        self._bits: dict[EngineId, int] = {}
        self._next = 0

    def bit(self, engine: EngineId) -> int:
        """Returns the engine's bit, and gives it one if it has none."""
        if engine not in self._bits:
            self._bits[engine] = 1 << self._next
            self._next += 1
        return self._bits[engine]

    def retire(self, engine: EngineId) -> None:
        """Takes the bit from the engine: a mask with that bit says nothing of the engine any more."""
        self._bits.pop(engine, None)

    @property
    def are_sparse(self) -> bool:
        """Whether so many bits mean nothing any more that it is time to renumber."""
        return self._next - len(self._bits) > _RETIRED_AT_MOST

    def renumber(self) -> dict[int, int]:
        """Gives live engines the lowest bits. Returns the new bit for each old one, for the owner of the masks."""
        moved = {}
        for i, (engine, old) in enumerate(self._bits.items()):
            moved[old] = self._bits[engine] = 1 << i
        self._next = len(self._bits)
        return moved


def each_bit(mask: int) -> Iterator[int]:
    """Yields the bits that are set, lowest first."""
    while mask:
        low = mask & -mask
        yield low
        mask ^= low
