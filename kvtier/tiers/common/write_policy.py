"""When a block is copied to the tier below, and how often blocks are used."""

import enum
from collections import OrderedDict
from typing import Generic, TypeVar

from kvtier.errors import InvalidInputError

K = TypeVar("K", bound=bytes)


class WritePolicy(enum.Enum):
    """One per boundary between a tier and the one below it."""

    WRITE_THROUGH = "write_through"
    """A block is written as soon as the upper tier has it. Others share it at once, and nothing is lost at eviction."""
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    """A block is written at its n-th use, so that what is used once costs the lower tier nothing. What never gets there
    is forgotten when the upper tier evicts it."""
    WRITE_BACK = "write_back"
    """A block is written when it comes close to its eviction, and at a stop. This policy writes least and shares last;
    when writing falls behind, a block is forgotten rather than waited for."""


class UseCounts(Generic[K]):
    """How often keys were used, up to `enough`. Forgets the keys that were used longest ago.

    Not thread-safe: the owner's lock guards it. O(1), about 0.3 us a use.
    """

    def __init__(self, enough: int, max_keys: int) -> None:
        """
        :param enough: the use that makes a key worth keeping, from 1.
        :param max_keys: keys remembered, about 150 bytes each. Small forgets a key between two uses of it.
        """
        if enough < 1 or max_keys < 1:
            raise InvalidInputError(f"use counts up to {enough} of {max_keys} keys: both must be at least 1")
        self._enough = enough
        self._max_keys = max_keys
        self._counts: OrderedDict[K, int] = OrderedDict()
        """Last used last. Guarded by the owner's lock."""

    def note(self, key: K) -> bool:
        """Counts a use. True when it is the one that makes the key worth keeping."""
        count = self._counts.get(key, 0)
        self._counts[key] = min(count + 1, self._enough)
        self._counts.move_to_end(key)
        if len(self._counts) > self._max_keys:
            self._counts.popitem(last=False)
        return count + 1 == self._enough

    def is_enough(self, key: K) -> bool:
        """Whether the key has had its uses."""
        return self._counts.get(key, 0) >= self._enough
