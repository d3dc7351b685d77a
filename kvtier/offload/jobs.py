"""Jobs of the directory: the blocks they move, how they end, and the bounds of all work under way."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from kvtier.identity.keys import BlockKey
from kvtier.offload.messages import HOST
from kvtier.policies.admission import Admission
from kvtier.policies.base import EvictionPolicy
from kvtier.policies.lru import LRU
from kvtier.tiers.common.write_policy import WritePolicy
from kvtier.tiers.host.entries import Entry

_Item = TypeVar("_Item")

Block = tuple[BlockKey, int]
"""A block to move: key, device slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectorySettings:
    """Bounds of the directory. The defaults suit a host tier of a few GiB and a pool on the same network."""

    batch_blocks: int = 32
    """Blocks per message. Smaller overlaps reads and copies better, larger has fewer round trips."""
    copy_batch_blocks: int = 0
    """Blocks per message between device and host memory alone, where this is more than `batch_blocks`. Nothing overlaps
    there, and a mover's thread waits for the interpreter several times per message, 5 ms each if the engine's thread is
    busy."""
    borrows: bool = False
    """Whether the shared tier is asked to lend blocks first. Blocks that it lends take no slot of the arena."""
    loan_blocks: int = 32
    """Blocks per message of those that are to be lent: one loan. While it is copied, another thread's is verified."""
    saving_fraction: float = 0.5
    """Share of the arena that saves may hold while lower tiers are written; beyond it, saves are dropped.
    Small drops saves in bursts, large lets a slow tier crowd out loads."""
    load_deadline_s: float = 10.0
    """A load that takes longer is given up and recomputed. Below the time of a good load, nothing hits."""
    lookup_deadline_s: float = 1.0
    """A lookup that takes longer counts as a miss. Requests wait this long at the most."""
    max_lookups: int = 1024
    """Lookups of the shared tier under way; beyond, local tiers answer alone."""
    host_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    """When the device's blocks are copied to host memory."""
    make_policy: Callable[[], EvictionPolicy[BlockKey]] = LRU
    """Makes the order in which blocks lose their slots in host memory."""
    tier_policies: Mapping[str, WritePolicy] = field(default_factory=dict)
    """When blocks in host memory are copied to the tier of this name; tiers not named get them at once."""
    tier_admissions: Mapping[str, Admission] = field(default_factory=dict)
    """Which blocks get to the local tier of this name at all. A tier that is not named gets all of them."""
    block_bytes: int = 0
    """Bytes of a block in all ranks together, as admissions count it."""
    selective_uses: int = 2
    """The use at which `write_through_selective` copies a block. Computing it is the first."""
    write_back_blocks: int = 256
    """How many of the coldest blocks in host memory `write_back` keeps written; never more than a quarter of it.
    Small forgets blocks in bursts, large writes some that are used again."""

    def batch_of(self, tier: str) -> int:
        """Returns the number of blocks per message that moves some between the device and this tier."""
        return max(self.batch_blocks, self.copy_batch_blocks) if tier == HOST else self.batch_blocks


@dataclass(frozen=True, slots=True)
class JobResult:
    """The end of a job.

    After a load: the device slots hold their KV, except those of the failed blocks. After a save: the
    device slots are no longer read. Either way the slots are the caller's again.
    """

    job_id: int
    kind: Literal["load", "save"]
    failed: frozenset[int]
    """Indexes into the job's blocks."""
    tiers: tuple[str, ...]
    """Load: the tier each block came from, empty for a failed one. Save: empty for all."""
    found: frozenset[int] = frozenset()
    """Save: indexes of blocks that were in host memory, or on their way there, before; these were not copied."""


def chunks(items: Sequence[_Item], size: int) -> Iterator[list[_Item]]:
    """Yields `items` in lists of at most `size`."""
    for start in range(0, len(items), size):
        yield list(items[start : start + size])


def columns(blocks: Sequence[Block], entries: Sequence[Entry[BlockKey]]) -> tuple[list[bytes], list[int], list[int]]:
    """Returns keys, arena slots and device slots of blocks and their index entries, as messages want them."""
    return [key for key, _ in blocks], [entry.slot for entry in entries], [device_slot for _, device_slot in blocks]
