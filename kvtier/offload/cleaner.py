"""The cleaner: keeps the cold end of the device's free queue already copied to host memory.

An allocation takes blocks from that end and must not wait for a copy. Blocks that are being copied are
referenced, so they are not in the queue at all; what the cleaner did not get to is dropped when it is
allocated, not waited for.
"""

from kvtier.device.block_pool import BlockPool
from kvtier.offload.hierarchy import Hierarchy
from kvtier.offload.jobs import JobResult
from kvtier.offload.metrics import HierarchyMetrics


class Cleaner:
    """Scheduler thread only. Call `step` once per engine step and offer it every job result."""

    def __init__(
        self, block_pool: BlockPool, hierarchy: Hierarchy, metrics: HierarchyMetrics, *, depth_blocks: int
    ) -> None:
        """
        :param depth_blocks: how far into the free queue blocks are kept clean; about what a few steps
            allocate. Too small drops blocks in bursts; too large copies blocks that may yet be hit.
        """
        self._block_pool, self._hierarchy, self._metrics = block_pool, hierarchy, metrics
        self._depth_blocks = depth_blocks
        self._held: dict[int, list[int]] = {}
        """Blocks referenced for the sake of a copy, by save job."""

    def step(self) -> None:
        """Starts copies of the cold blocks that host memory should have. O(depth) when there is nothing to do."""
        if self._held:
            return
        coldest = self._block_pool.coldest(self._depth_blocks)
        cold = [block for block in coldest if self._hierarchy.worth_saving(block[0])]
        job_id = self._hierarchy.start_save(cold) if cold else None
        if job_id is not None:
            block_ids = [block_id for _, block_id in cold]
            self._block_pool.acquire(block_ids)
            self._held[job_id] = block_ids

    def take(self, result: JobResult) -> bool:
        """Gives the blocks of a finished copy back to the cold end. False when the job is not the cleaner's."""
        block_ids = self._held.pop(result.job_id, None)
        if block_ids is None:
            return False
        self._block_pool.free(block_ids[::-1], cold=True)
        return True

    def note_waited(self) -> None:
        """Counts an allocation that failed only because blocks were held by copies."""
        self._metrics.evictions_waited.inc()

    @property
    def num_held(self) -> int:
        """Blocks out of the free queue for the sake of a copy."""
        return sum(map(len, self._held.values()))
