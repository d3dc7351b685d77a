"""Branches of one request share their blocks; who writes to a shared one copies it first.

As in vLLM's first design (Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention", 2023, section 4.4). Full blocks are never written to again, so at most one block per branch is copied:
the one that was partly filled when they parted.
"""

from collections.abc import Callable

from kvtier.device.block_pool import BlockPool
from kvtier_engine.scheduling.request import Request

CopyTokens = Callable[[int, int, int], None]
"""Copies the KV of the first so many tokens from one device block to another: `(source, target, num_tokens)`. In the
order of the engine's computation: what was computed before is copied, and what is computed or loaded later does not
change what is copied."""


class CopyOnWrite:
    """Shares and parts blocks of requests. Scheduler thread only; nothing blocks."""

    def __init__(self, block_pool: BlockPool, tokens_per_block: int, copy_tokens: CopyTokens) -> None:
        self._block_pool, self._tokens_per_block, self._copy_tokens = block_pool, tokens_per_block, copy_tokens

    def share(self, parent: Request, branch: Request) -> None:
        """Gives `branch` references to all blocks of `parent`, and all that was computed into them.

        Call it in the step that computed the last token of `parent`, whose full blocks are published in that step.
        """
        self._block_pool.acquire(parent.held_blocks)
        branch.block_ids = list(parent.block_ids)
        branch.windowed = [list(table) for table in parent.windowed]
        branch.num_computed = parent.num_computed
        branch.num_published = parent.num_computed // self._tokens_per_block

    def may_write(self, request: Request) -> bool:
        """Whether nobody else has the block that `request` writes to next."""
        position, num_tokens = divmod(request.num_computed, self._tokens_per_block)
        # Only forks share a block that is not full: blocks are found, and saved, when they are. What is true of the
        # full group's block is true of the others at its position, which are shared and copied together with it.
        return not num_tokens or not self._block_pool.is_shared(request.block_ids[position])

    def part(self, request: Request) -> bool:
        """Makes the block that `request` writes to next its own, in every KV group. False when that needs blocks that
        are not free."""
        if self.may_write(request):
            return True
        position, num_tokens = divmod(request.num_computed, self._tokens_per_block)
        tables = [request.block_ids, *request.windowed]
        fresh = self._block_pool.allocate(len(tables))
        if fresh is None:
            return False
        for table, own in zip(tables, fresh, strict=True):
            self._copy_tokens(table[position], own, num_tokens)
            self._block_pool.free([table[position]])
            table[position] = own
        return True
