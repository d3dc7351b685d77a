"""What engines hold on their devices and in their host memory, as their KV events tell."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import and_, or_
from typing import NamedTuple

from kvtier_gateway.routing.engine_bits import EngineBits, each_bit
from kvtier_gateway.routing.key_masks import KeyMasks
from kvtier_gateway.routing.values import BlocksCleared, BlocksStored, EngineId, Key, KvEvent, Medium

MAX_KEYS = 1_000_000
_AT_A_TIME = 64


class Runs(NamedTuple):
    """How many of a prompt's leading blocks an engine has."""

    device: int
    """Blocks on its device."""
    local: int
    """Blocks on its device or in its host memory, each in either: at least `device`."""


class _Found(NamedTuple):
    """What `KvIndex.runs` has found, and for what."""

    keys: Sequence[Key]
    engines: Sequence[EngineId]
    version: int
    runs: list[Runs]


class KvIndex:
    """An index over all engines, bounded by `max_keys` in each medium. Not safe for threads.

    A lookup takes about 0.1 µs for each leading block that any engine has, and 0.5 µs for each engine that has some.
    """

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._bits = EngineBits()
        self._media = {medium: KeyMasks(max_keys) for medium in Medium}
        self._version = 0
        """Grows with each change."""
        self._last: _Found | None = None

    def __len__(self) -> int:
        return sum(map(len, self._media.values()))

    def apply(self, engine: EngineId, event: KvEvent) -> None:
        """Notes what an event of the engine says."""
        self._version += 1
        if isinstance(event, BlocksCleared):
            self.forget(engine)
            return
        masks, bit = self._media[event.medium], self._bits.bit(engine)
        change = masks.add if isinstance(event, BlocksStored) else masks.remove
        change(event.keys, bit)

    def forget(self, engine: EngineId) -> None:
        """Forgets all that the engine has. O(1); once in 64 times O(keys)."""
        self._version += 1
        self._bits.retire(engine)
        if self._bits.are_sparse:
            moved = self._bits.renumber()
            for masks in self._media.values():
                masks.renumber(moved)

    def runs(self, keys: Sequence[Key], engines: Sequence[EngineId]) -> list[Runs]:
        """Returns how many of the leading blocks each engine has.

        The answer is kept: asked for the same list of keys again, before anything has changed, it costs nothing.
        """
        last = self._last
        if last is None or last.keys is not keys or last.version != self._version or last.engines != engines:
            last = self._last = _Found(keys, engines, self._version, self._runs(keys, engines))
        return last.runs

    def _runs(self, keys: Sequence[Key], engines: Sequence[EngineId]) -> list[Runs]:
        bits = [self._bits.bit(engine) for engine in engines]
        on_device, in_host = self._media[Medium.DEVICE], self._media[Medium.HOST]
        device = local = sum(bits)
        device_ends: dict[int, int] = {}
        local_ends: dict[int, int] = {}
        # The first block is looked at alone: most engines that lack anything lack that.
        for start, end in pairwise((0, *range(1, len(keys), _AT_A_TIME), len(keys))):
            some = keys[start:end]
            masks = on_device.get_all(some)
            device = _without_ended(device, masks, start, device_ends)
            if local != device:
                local = _without_ended(local, list(map(or_, masks, in_host.get_all(some))), start, local_ends)
                if not local:
                    break
        return [Runs(device_ends.get(bit, len(keys)), local_ends.get(bit, len(keys))) for bit in bits]

    def touch(self, keys: Sequence[Key]) -> None:
        """Notes that these blocks are in use, so that others are forgotten before them."""
        self._version += 1
        for masks in self._media.values():
            masks.touch(keys)


def _without_ended(bits: int, masks: Sequence[int], start: int, ends: dict[int, int]) -> int:
    """Returns those of the bits that all masks have, and notes at which mask each other one ends.

    :param start: the place of the first mask.
    """
    left = list(accumulate(masks, and_, initial=bits))
    place = start - 1
    while left[-1] != bits:
        place += left.count(bits)  # they stand together, as bits only ever get lost
        after = left[place - start + 1]
        ends |= dict.fromkeys(each_bit(bits & ~after), place)
        bits = after
    return bits
