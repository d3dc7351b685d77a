"""Blocks in the order of their last use."""

NO_SLOT = 0
"""No block is in this slot."""
_APART = 64


def length_at_first(number: int) -> int:
    """The entries that a column has at first, which later has one for each slot, and one for `NO_SLOT`.

    Each number is for one of the columns of a policy, so that no request lets several of them grow: to copy one of
    100,000 entries takes 0.3 ms.
    """
    return 1 + number * _APART


class UseOrder:
    """A ring of slots, the one that was used longest ago first. Not thread-safe: the owner's lock guards it.

    The links are two columns of numbers with an entry for each slot: one insertion into an `OrderedDict` of 30,000 keys
    takes 20 ms when it makes its table anew. Every call is O(1), but for `oldest`.
    """

    def __init__(self) -> None:
        self.older = [NO_SLOT] * length_at_first(1)
        """The neighbours of each slot; `NO_SLOT` is between the last and the first. All fields: guarded by the owner's
        lock."""
        self.newer = [NO_SLOT] * length_at_first(2)

    def add_slot(self) -> None:
        self.older.append(NO_SLOT)
        self.newer.append(NO_SLOT)

    def append(self, slot: int) -> None:
        """A slot that is not in the ring is used now."""
        older, newer = self.older, self.newer
        newest = older[NO_SLOT]
        older[slot] = newest
        newer[slot] = NO_SLOT
        newer[newest] = older[NO_SLOT] = slot

    def renew(self, slot: int) -> None:
        """A slot that is in the ring is used now."""
        older, newer = self.older, self.newer
        before, after = older[slot], newer[slot]
        newer[before] = after
        older[after] = before
        newest = older[NO_SLOT]
        older[slot] = newest
        newer[slot] = NO_SLOT
        newer[newest] = older[NO_SLOT] = slot

    def remove(self, slot: int) -> None:
        older, newer = self.older[slot], self.newer[slot]
        self.newer[older] = newer
        self.older[newer] = older

    def oldest(self, most: int) -> list[int]:
        """The first slots, at most so many. O(most)."""
        slots: list[int] = []
        slot = self.newer[NO_SLOT]
        while slot and len(slots) < most:
            slots.append(slot)
            slot = self.newer[slot]
        return slots
