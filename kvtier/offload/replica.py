"""Ranks that hold the same KV, as with latent attention under tensor parallelism: one of them writes a block."""

from dataclasses import dataclass

from kvtier.identity.keys import StoreKey


@dataclass(frozen=True, slots=True)
class Replica:
    """One of `num_ranks` that have one namespace."""

    rank: int
    """The rank's number among the replicas, from 0."""
    num_ranks: int

    def writes(self, key: StoreKey) -> bool:
        """Whether it is this rank that writes a block to a tier where the others find it.

        Hashes are spread evenly, and so is the work. Nobody stands in for a rank that fails: a cache may forget.
        """
        return int.from_bytes(key[-8:], "big") % self.num_ranks == self.rank


ALONE = Replica(0, 1)
"""A rank whose KV no other rank holds."""
