"""Which blocks a disk tier has and how much disk they take. Bookkeeping only."""

from collections import Counter

from kvtier.errors import InvariantError
from kvtier.eviction import LRU
from kvtier.keys import TENANT_ID_BYTES, StoreKey, TenantId
from kvtier.tiers.memory import PAGE_BYTES, round_up


class DiskBlock:
    """A file on disk or on its way there. Only the index writes its fields."""

    __slots__ = ("footprint_bytes", "nbytes", "number", "ready")

    def __init__(self, number: int) -> None:
        self.number = number
        """Part of the file's name; no other file of this folder has it."""
        self.nbytes = 0
        """Length of the file: header and payload as stored. Known from `set_aside` on."""
        self.footprint_bytes = 0
        """Disk space set aside for it, in whole pages."""
        self.ready = False
        """Written and under its final name."""


class DiskIndex:
    """Blocks by key, least recently used first, and the disk space they take.

    Space is counted from before a file is made (`set_aside`) until it is gone (`gone`), also while
    its block is hidden already; so the sum is never less than what is on the disk.

    Not thread-safe: the tier's lock guards all of it. Every method is O(1) except `check`.
    """

    def __init__(self) -> None:
        self._blocks: dict[StoreKey, DiskBlock] = {}
        """Visible blocks, those being written included."""
        self._policy: LRU[StoreKey] = LRU()
        """Exactly the visible, ready ones."""
        self._used_bytes = 0
        """Footprints of all visible and hidden blocks."""
        self._hidden_bytes = 0
        """Footprints of blocks that were taken out and whose files may still be there."""
        self._num_blocks_of: Counter[TenantId] = Counter()
        """Ready blocks by tenant."""
        self._bytes_of: Counter[TenantId] = Counter()
        """Their footprints."""
        self._next_number = 1

    @property
    def num_ready(self) -> int:
        return len(self._policy)

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def usage_of(self, tenant: TenantId) -> tuple[int, int]:
        """Ready blocks of one tenant, and their footprints in bytes."""
        return self._num_blocks_of[tenant], self._bytes_of[tenant]

    def find(self, key: StoreKey) -> DiskBlock | None:
        """The visible block, ready or being written. Not a use."""
        return self._blocks.get(key)

    def use(self, key: StoreKey) -> DiskBlock | None:
        """The block if it is ready; counts as a use."""
        block = self._blocks.get(key)
        if block is None or not block.ready:
            return None
        self._policy.touch(key)
        return block

    def claim(self, key: StoreKey) -> DiskBlock | None:
        """A block to be written by the caller, until `commit` or `take_out`; None when the key is there."""
        if key in self._blocks:
            return None
        block = self._blocks[key] = DiskBlock(self._next_number)
        self._next_number += 1
        return block

    def adopt(self, key: StoreKey, number: int, nbytes: int) -> None:
        """Takes over a file that is there; the key is not."""
        block = self._blocks[key] = DiskBlock(number)
        self._next_number = max(self._next_number, number + 1)
        self.set_aside(key, block, nbytes)
        self.commit(key, block)

    def set_aside(self, key: StoreKey, block: DiskBlock, nbytes: int) -> None:
        """The block's file will have `nbytes`: counts its footprint from now on. Once per block."""
        block.nbytes = nbytes
        block.footprint_bytes = footprint_bytes(nbytes)
        self._used_bytes += block.footprint_bytes
        if self._blocks.get(key) is not block:
            self._hidden_bytes += block.footprint_bytes

    def commit(self, key: StoreKey, block: DiskBlock) -> bool:
        """Makes a claimed block ready. False when its key was taken out meanwhile."""
        if self._blocks.get(key) is not block:
            return False
        block.ready = True
        self._policy.insert(key)
        self._count_ready(key, block, 1)
        return True

    def take_out(self, key: StoreKey, expected: DiskBlock | None = None) -> DiskBlock | None:
        """Hides a block; its footprint counts until `gone`. None when there is none, or not `expected`."""
        block = self._blocks.get(key)
        if block is None or expected not in (None, block):
            return None
        del self._blocks[key]
        self._hidden_bytes += block.footprint_bytes
        if key in self._policy:
            self._policy.remove(key)
            self._count_ready(key, block, -1)
        return block

    def take_coldest(self) -> tuple[StoreKey, DiskBlock] | None:
        """Hides the ready block that was used longest ago."""
        key = self._policy.pop()
        if key is None:
            return None
        block = self._blocks.pop(key)
        self._hidden_bytes += block.footprint_bytes
        self._count_ready(key, block, -1)
        return key, block

    def gone(self, block: DiskBlock) -> None:
        """The file of a hidden block is no longer there."""
        self._used_bytes -= block.footprint_bytes
        self._hidden_bytes -= block.footprint_bytes

    def check(self) -> None:
        """Raises `InvariantError` when the books do not add up. O(blocks)."""
        if self._used_bytes != sum(block.footprint_bytes for block in self._blocks.values()) + self._hidden_bytes:
            raise InvariantError(f"disk index: {self._used_bytes} bytes in use are miscounted")
        num_ready = sum(block.ready for block in self._blocks.values())
        if num_ready != len(self._policy):
            raise InvariantError(f"disk index: {num_ready} ready blocks, but the policy knows {len(self._policy)}")
        if any(block.ready and key not in self._policy for key, block in self._blocks.items()):
            raise InvariantError("disk index: the policy does not know a ready block")
        if self._num_blocks_of.total() != num_ready:
            raise InvariantError("disk index: the tenants' blocks are miscounted")

    def _count_ready(self, key: StoreKey, block: DiskBlock, sign: int) -> None:
        tenant = TenantId(key[:TENANT_ID_BYTES])
        self._num_blocks_of[tenant] += sign
        self._bytes_of[tenant] += sign * block.footprint_bytes


def footprint_bytes(nbytes: int) -> int:
    """Disk space of a file of `nbytes`."""
    return round_up(nbytes, PAGE_BYTES)
