"""What a policy is told, and what it is asked. It knows keys and their uses, and holds no bytes."""

from collections.abc import Hashable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

K = TypeVar("K", bound=Hashable)


class Use(NamedTuple, Generic[K]):
    """What is known of the request that uses a block. Cheap to make: 0.3 us."""

    parent: K | None = None
    """The key of the block before it. None for the first block of a prefix, or where it is unknown."""
    position: int = 0
    """The block's index in the request, from 0."""
    num_blocks: int = 1
    """How many blocks the request has."""
    num_hits: int = -1
    """How many leading blocks of the request were found. -1: unknown."""
    priority: int = 0
    """Higher stays longer, where the policy heeds it."""
    nbytes: int = 0
    """The size of the block; 0 where it is unknown."""


UNKNOWN_USE: Use[Any] = Use()
"""A use of which nothing is known but the key."""


def use_in_batch(keys: Sequence[K], i: int, nbytes: int) -> Use[K]:
    """The use of block `i` of a batch, with what the batch says of it. 0.2 us, two thirds of what `Use` takes."""
    return tuple.__new__(Use, (keys[i - 1] if i else None, i, len(keys), -1, 0, nbytes))


class EvictionPolicy(Protocol[K]):
    """Says which key goes first. Not thread-safe: the owner's lock guards it. O(1) or O(log n) unless said otherwise.

    A block is worth nothing without the blocks before it in its chain, so whoever inserts or touches
    the blocks of one request does so from the last to the first: then tails are evicted before heads.
    """

    def insert(self, key: K, use: Use[K]) -> None:
        """Adds a key that is not there, as used just now. It may have been there before."""

    def touch(self, key: K, use: Use[K]) -> None:
        """Notes a use of a key that is there."""

    def remove(self, key: K, *, evicted: bool) -> None:
        """Takes out a key that is there.

        `evicted`: its room was needed, and the policy may remember the key for the case that it comes back. So does a
        key leave that is only parked, as it is in use when its turn comes: it is inserted again after that, as one that
        came back, and counts as part of the capacity meanwhile. A policy that remembers nothing takes it for new.
        Otherwise the key was discarded, and nothing of it is remembered.
        """

    def coldest(self, most: int) -> list[K]:
        """The first to evict, at most so many, in order; fewer, where to find as many would take too long. They stay
        until removed. O(most), or O(most log n)."""

    def __len__(self) -> int:
        """How many keys are there; those that are only remembered do not count."""

    def __contains__(self, key: object) -> bool: ...
