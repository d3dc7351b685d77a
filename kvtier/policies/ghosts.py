"""Evicted blocks, remembered in 8 bytes each."""

from array import array
from collections.abc import Hashable

_PAGE_BITS = 9
_PAGE = 1 << _PAGE_BITS
_MIX = 0x9E3779B97F4A7C15
_VALUE_BITS = 40
_VALUE = (1 << _VALUE_BITS) - 1
_TAG = (1 << 24) - 1
NO_GHOST = -1


class Ghosts:
    """Remembers a number of 40 bits for each of many evicted blocks, until others need its place in a table.

    A block has two places to choose from, and takes the one with the smaller number, so numbers should grow with time.
    Keys that are bytes or numbers have the same places in every process, whatever `hash` says, so that a simulation can
    be repeated. Two keys in one place are taken for one another once in 8 million times. Not thread-safe: the
    owner's lock guards it. 0.4 us a call.
    """

    def __init__(self, num_places: int) -> None:
        """:param num_places: how many blocks it remembers at most; an even number."""
        self._num_pairs = num_places // 2
        self._pages: list[array[int] | None] = [None] * ((num_places >> _PAGE_BITS) + 1)
        """Each entry has some bits of the key, never all 0, above the number; 0: nothing is remembered there. A page is
        made when it is first written to, so that no call makes them all. Guarded by the owner's lock."""

    def swap(self, mixed: int, value: int) -> int:
        """Remembers a block; returns the number of the one that is forgotten for it, or `NO_GHOST`."""
        tag, pair = divmod(mixed, self._num_pairs)
        entries = self._pages[pair >> _PAGE_BITS - 1]
        if entries is None:
            entries = self._pages[pair >> _PAGE_BITS - 1] = array("Q", bytes(8 * _PAGE))
        index = 2 * pair & _PAGE - 1
        old = entries[index]
        if old and (other := entries[index + 1]) & _VALUE < old & _VALUE:
            index += 1
            old = other
        entries[index] = (tag & _TAG | 1) << _VALUE_BITS | value
        return old & _VALUE if old else NO_GHOST

    def take(self, mixed: int) -> int:
        """Forgets a block; returns its number, or `NO_GHOST`."""
        tag, pair = divmod(mixed, self._num_pairs)
        entries = self._pages[pair >> _PAGE_BITS - 1]
        if entries is None:
            return NO_GHOST
        tag = tag & _TAG | 1
        index = 2 * pair & _PAGE - 1
        old = entries[index]
        if old >> _VALUE_BITS != tag:
            index += 1
            old = entries[index]
            if old >> _VALUE_BITS != tag:
                return NO_GHOST
        entries[index] = 0
        return old & _VALUE


def mixed_hash(key: Hashable) -> int:
    """61 bits. The hash of a number is its rest by the prime 2**61 - 1, so that all of its bits count."""
    if type(key) is bytes:
        return hash(int.from_bytes(key, "little") * _MIX)
    return hash(abs(hash(key)) * _MIX)
