"""What LRU would have had of a cache's uses, and whether another order has earned the right to differ from it."""

_TICKS_PER_CAPACITY = 128
TICKS_PER_EPOCH = 32
"""An epoch is a quarter of the capacity, in uses."""
_GRANT = 0.004
"""Hits, as a share of all uses, that the other order may lose to LRU in the long run."""
_FIRST_CREDIT = 0.025
_TRUST_FROM = 0.06
_MOST_CREDIT = 8.0
"""Credit in capacities: at first, from when on the other order is trusted again, and at most."""


class LRUShadow:
    """Counts hits of LRU by the ages of blocks, and holds them against the hits that there were.

    LRU has the blocks that were used most recently, as many as fit. A use would have hit in LRU where the block's
    use before is not older than that of the last block that fits. Time is counted in ticks, of which each
    takes as many uses as 1/128 of the capacity. The order that is compared must remember what it has evicted.

    The other order has a credit: it pays each hit that only LRU would have had, and earns each that LRU would not have
    had, and a grant for each use. An order that has used up the credit is not trusted until the grants have made up
    for it. No traffic loses much more than the grant and the first credit, whatever the other order does.

    Not thread-safe: the policy owner's lock guards all of it. 0.2 us a use.
    """

    def __init__(self, num_blocks: int | None) -> None:
        """
        :param num_blocks: the capacity. None: it is not known yet, and the other order, which can have learned nothing,
            is not trusted at first.
        """
        self.tick = 1
        """The time now."""
        self.is_trusted = num_blocks is not None
        """Whether the other order may evict. It changes at the end of ticks only."""
        self._capacity = num_blocks or 0
        """The capacity in blocks; 0 until it is known."""
        self._cut = 0
        """Blocks that were last used before this tick would not be in the cache of LRU any more."""
        self._cut_of_run = 0
        """The cut when the request began that is used now: hits are what was there before it."""
        self._num_not_latest = 0
        """Uses in this tick of blocks that were used in it before, or are discarded."""
        self._num_by_tick: dict[int, int] = {}
        """Blocks by the tick of their last use, from the oldest on; those after `_cut` and before this tick."""
        self._num_within = 0
        """The blocks after `_cut` and before this tick."""
        self._credit = _FIRST_CREDIT * self._capacity

    def set_capacity(self, num_blocks: int) -> None:
        """A capacity that becomes known, or another one than was told before."""
        if not self._capacity:
            self._credit = _FIRST_CREDIT * num_blocks
        self._capacity = num_blocks

    def begin_run(self) -> None:
        """The uses that follow are those of one request."""
        self._cut_of_run = self._cut

    def use(self, last: int, is_hit: bool) -> None:
        """Notes a use of a block. That of one which was not there, and not known, need not be told.

        :param last: the tick of its use before; -1 where that is not known.
        :param is_hit: whether the block was there when the run began.
        """
        if last > self._cut_of_run:
            if not is_hit:
                self._credit -= 1.0
        elif is_hit:
            self._credit += 0.5 if last == self._cut_of_run else 1.0
        elif last == self._cut_of_run:
            self._credit -= 0.5
        self.discard(last)

    def discard(self, last: int) -> None:
        """Forgets a block that was last used at that tick, as if it had never been there."""
        if last == self.tick:
            self._num_not_latest += 1
        elif last in self._num_by_tick:
            self._num_within -= 1
            self._num_by_tick[last] -= 1
            if not self._num_by_tick[last]:
                del self._num_by_tick[last]

    def next_tick(self, num_uses: int) -> None:
        """:param num_uses: that the tick had."""
        by_tick = self._num_by_tick
        num_latest = num_uses - self._num_not_latest
        self._num_not_latest = 0
        if num_latest:
            by_tick[self.tick] = num_latest
            self._num_within += num_latest
        self.tick += 1
        capacity = self._capacity
        if not capacity:
            return
        while self._num_within > capacity:
            self._cut = next(iter(by_tick))
            self._num_within -= by_tick.pop(self._cut)
        if self._cut:
            self._credit = min(self._credit + num_uses * _GRANT, _MOST_CREDIT * capacity)
            self.is_trusted = self._credit >= (0.0 if self.is_trusted else _TRUST_FROM * capacity)


def uses_per_tick(num_blocks: int) -> int:
    """The uses per tick of a cache of that capacity, at least 1."""
    return max(num_blocks // _TICKS_PER_CAPACITY, 1)
