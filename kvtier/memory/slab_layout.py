"""How a slab of shared memory is laid out, and what a process needs to map one.

Slots come first, from the start of a page. Behind them, from the next page on, come 64-bit words: one that is 1 while
the slab is in use, then the generation of each slot's content. A slab that is not shared has no words.
"""

from typing import NamedTuple

from kvtier.memory.pages import PAGE_BYTES, round_up

SLAB_STRIDE = 1 << 32
"""Slot id = slab number * stride + place in the slab. Slab numbers are never used again, so an id is one place."""
WORD_BYTES = 8


def words_of(payload_bytes: int, num_slots: int) -> slice:
    """Returns where in a shared slab its words lie, behind the slots: a u64 that is 1 as long as the slab is in use,
    then the generation of each slot's content."""
    start = round_up(payload_bytes, PAGE_BYTES)
    return slice(start, start + (1 + num_slots) * WORD_BYTES)


def slab_bytes(slot_bytes: int, num_slots: int, *, shared: bool) -> int:
    """Memory of a slab of `num_slots`: whole pages."""
    payload_bytes = slot_bytes * num_slots
    return round_up(words_of(payload_bytes, num_slots).stop if shared else payload_bytes, PAGE_BYTES)


class SharedSlab(NamedTuple):
    """A slab that another process may map."""

    descriptor: int
    writable: bool
    slot_bytes: int
    num_slots: int
