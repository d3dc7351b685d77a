"""What the directory keeps of work under way. Scheduler thread only, like the directory itself."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvtier.keys import ChainHash
from kvtier.tiers.slot_index import Entry

Block = tuple[ChainHash, int]
"""A block to move: chain hash, device slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectorySettings:
    """Bounds of the directory. The defaults suit a host tier of a few GiB and a pool on the same network."""

    batch_blocks: int = 32
    """Blocks per message. Smaller overlaps reads and copies better, larger has fewer round trips."""
    saving_fraction: float = 0.5
    """Share of the arena that saves may hold while lower tiers are written; beyond it, saves are dropped.
    Small drops saves in bursts, large lets a slow tier crowd out loads."""
    load_deadline_s: float = 10.0
    """A load that takes longer is given up and recomputed. Below the time of a good load, nothing hits."""
    lookup_deadline_s: float = 1.0
    """A lookup that takes longer counts as a miss. Requests wait this long at the most."""
    max_lookups: int = 64
    """Lookups of the shared tier under way; beyond, local tiers answer alone."""
    lookup_threads: int = 2
    """Threads that ask the shared tier."""


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
    """Load: the tier each block came from, empty for a failed one. Save: nothing."""


@dataclass(slots=True)
class Job:
    job_id: int
    kind: Literal["load", "save"]
    blocks: list[Block]
    deadline: float
    queued: deque[int]
    """Load: indexes not given to the movers yet."""
    tiers: list[str]
    open: set[int] = field(default_factory=set)
    """Batches that may still touch the job's device slots."""
    ok: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Batch:
    """What the movers were given. Over when `on_arena` is empty."""

    batch_id: int
    job: Job
    indexes: list[int]
    source: str
    """Load: the tier to read. Save: nothing."""
    entries: list[Entry[ChainHash]]
    """Index entries of the blocks: pinned if ready, else being written."""
    ok: list[bool]
    on_device: set[int]
    """Ranks that may still touch the device slots."""
    on_arena: set[int]
    """Ranks that may still touch the arena slots."""
    cancelled: bool = False
    """A rank gave up on the device copy."""

    def columns(self) -> tuple[list[bytes], list[int], list[int]]:
        """Chain hashes, arena slots and device slots, as messages want them."""
        blocks = [self.job.blocks[index] for index in self.indexes]
        return [h for h, _ in blocks], [e.slot for e in self.entries], [device_slot for _, device_slot in blocks]


def chunks(indexes: Sequence[int], size: int) -> Iterator[list[int]]:
    """`indexes` in lists of at most `size`."""
    for start in range(0, len(indexes), size):
        yield list(indexes[start : start + size])
