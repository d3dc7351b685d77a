"""The mover: the half of the hierarchy that has the memory. One per worker process (rank).

    Fetcher      arena or lent memory -> device; what is not in the arena is read from its tier first
    Saver        device -> arena
    CopyQueue    which batches of the two are copied together
    TierWriter   arena -> tiers: checksums, then one writer per tier, also of discards
    Threads      all threads of them, in the order in which they are ended
    Answers      what the directory is to hear

What they may take on is bounded by the arena: the directory gives every block on the move a slot of it, but for those
that a tier may lend.
"""

from kvtier.offload.mover.mover import Mover
from kvtier.offload.mover.threads import OTHER_COPIES
from kvtier.offload.mover.tiers import MoverTiers

__all__ = ["OTHER_COPIES", "Mover", "MoverTiers"]
