"""What client and pool know of pins: the answers, a byte per block."""

import enum


class PinStatus(enum.IntEnum):
    """Answer to a pin of one block."""

    MISS = 0
    """The block is not in the pool's memory. What is only below it is brought up by a read, and can be pinned then."""
    PINNED = 1
    """Stays in memory for the time asked for, or longer if it was pinned longer before."""
    FULL = 2
    """There, and may be evicted: as much is pinned as this tenant, or all together, may pin."""
