"""Evicted blocks, remembered in 8 bytes each."""

from array import array
from collections.abc import Hashable

_PAGE_BITS = 12
_PAIR = (1 << _PAGE_BITS) - 1
_WORDS_PER_PAIR = 4
_MIX = 0x9E3779B97F4A7C15
_KIND_BITS = 9
_KIND = (1 << _KIND_BITS) - 1
_TAG = (1 << 32) - 1 - _KIND
_TICK = (1 << 32) - 1
NO_GHOST = -1


class Ghosts:
    """Remembers class and last use of many evicted blocks, until others need their places in a table.

    A block has two places to choose from, and takes the one that was used longer ago. Keys that are bytes or numbers
    have the same places in every process, whatever `hash` says, so that a simulation can be repeated. Two keys in one
    place are taken for one another once in 4 million times. Not thread-safe: the owner's lock guards it. 0.2 us a call.
    """

    def __init__(self, num_places: int, now: int) -> None:
        """
        :param num_places: how many blocks it remembers at most; an even number.
        :param now: the tick.
        """
        self._num_pairs = num_places // 2
        self._pages: list[array[int] | None] = [None] * ((self._num_pairs >> _PAGE_BITS) + 1)
        """Two words for each place. The first has some bits of the key and one more than the class; 0: nothing is
        remembered there. The second has the tick. A page is made when it is first written to, so that no call makes
        them all. All fields: guarded by the owner's lock."""
        self._cycle = now & ~_TICK
        """What ticks begin from. Others than those of the next 2**32 are taken for some that are yet to come."""
        self.tick = 0
        """The last use of the block of which a call has just returned the class."""

    def swap(self, mixed: int, kind: int, tick: int) -> int:
        """Remembers a block; returns the class of the one that is forgotten for it, or `NO_GHOST`. See `tick`."""
        tag, pair = divmod(mixed, self._num_pairs)
        words = self._pages[pair >> _PAGE_BITS]
        if words is None:
            words = self._pages[pair >> _PAGE_BITS] = array("I", bytes(4 * _WORDS_PER_PAIR << _PAGE_BITS))
        index = (pair & _PAIR) * _WORDS_PER_PAIR
        old_tick, tick_beside = words[index + 1], words[index + 3]
        # Where several were last used at the same time, the one with the smallest class is forgotten.
        if tick_beside < old_tick or (tick_beside == old_tick and words[index + 2] & _KIND < words[index] & _KIND):
            index += 2
            old_tick = tick_beside
        old = words[index]
        words[index] = tag << _KIND_BITS & _TAG | kind + 1
        words[index + 1] = tick & _TICK
        self.tick = old_tick + self._cycle
        return (old & _KIND) - 1

    def lasts_until(self, now: int) -> bool:
        """Whether blocks that are used at that tick can be remembered."""
        return now - self._cycle <= _TICK

    def take(self, mixed: int) -> int:
        """Forgets a block; returns its class, or `NO_GHOST`. See `tick`."""
        tag, pair = divmod(mixed, self._num_pairs)
        words = self._pages[pair >> _PAGE_BITS]
        if words is None:
            return NO_GHOST
        tag = tag << _KIND_BITS & _TAG
        index = (pair & _PAIR) * _WORDS_PER_PAIR
        old = words[index]
        if old & _TAG != tag or not old:
            index += 2
            old = words[index]
            if old & _TAG != tag or not old:
                return NO_GHOST
        self.tick = words[index + 1] + self._cycle
        words[index] = words[index + 1] = 0
        return (old & _KIND) - 1


def mixed_hash(key: Hashable) -> int:
    """A number of 61 bits and a sign. The hash of a number is its rest by a prime, so that all of its bits count."""
    if type(key) is bytes:
        return hash(int.from_bytes(key, "little") * _MIX)
    return hash(hash(key) * _MIX)
