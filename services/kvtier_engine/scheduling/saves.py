"""Copies of the device's full blocks down to the tiers, and the blocks that they hold."""

from kvtier.device.block_pool import BlockPool
from kvtier.offload import Block, Hierarchy
from kvtier.system.tracing import NO_CONTEXT, tracing
from kvtier_engine.scheduling.request import Request


class Saves:
    """Saves blocks that became full or were hit. Scheduler thread only; nothing blocks.

    The blocks are referenced until they are copied, so that nobody writes to them meanwhile.
    """

    def __init__(self, block_pool: BlockPool, hierarchy: Hierarchy) -> None:
        self._block_pool, self._hierarchy = block_pool, hierarchy
        self.held: dict[int, list[int]] = {}
        """Blocks referenced for the sake of a copy, by job."""
        self._unsaved: dict[str, list[Block]] = {}
        """Became full in this step, by the trace that they belong to."""

    def note_full(self, request: Request, blocks: list[Block]) -> None:
        """These blocks of a request became full: `start` saves them."""
        trace = NO_CONTEXT if request.spans is None else request.spans.context
        self._unsaved.setdefault(trace, []).extend(blocks)

    def note_hits(self, blocks: list[Block]) -> None:
        """These blocks were hit on the device, which may be the use at which they are saved."""
        self._hold(self._hierarchy.note_hits(blocks), blocks)

    def start(self) -> None:
        """Sends what became full down: in one batch, and what is of traced requests in one for each of them."""
        for trace, blocks in self._unsaved.items():
            with tracing.within(trace):
                self._hold(self._hierarchy.save_full(blocks), blocks)
        self._unsaved.clear()

    def end(self, job_id: int) -> None:
        """A save has read its blocks."""
        self._block_pool.free(self.held.pop(job_id))

    def _hold(self, job_id: int | None, blocks: list[Block]) -> None:
        """Keeps the blocks of a save as they are until it has read them."""
        if job_id is not None:
            self.held[job_id] = [block_id for _, block_id in blocks]
            self._block_pool.acquire(self.held[job_id])
