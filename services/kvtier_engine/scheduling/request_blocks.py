"""Which device blocks a request has, in all KV groups: taken at its start, more as it goes on, and given back."""

from kvtier.device.block_pool import BlockPool
from kvtier.offload import Block
from kvtier_engine.scheduling.copy_on_write import CopyOnWrite, CopyTokens
from kvtier_engine.scheduling.partial_reuse import PartialHit
from kvtier_engine.scheduling.request import NO_BLOCK, Request
from kvtier_engine.scheduling.windowed_blocks import WindowedBlocks


class RequestBlocks:
    """Hands out blocks to requests, and takes them back. Scheduler thread only; nothing blocks."""

    def __init__(
        self, block_pool: BlockPool, windowed: WindowedBlocks, tokens_per_block: int, copy_tokens: CopyTokens
    ) -> None:
        """:param windowed: works on the same block pool."""
        self._block_pool, self._windowed = block_pool, windowed
        self._tokens_per_block, self._copy_tokens = tokens_per_block, copy_tokens
        self._copy_on_write = CopyOnWrite(block_pool, tokens_per_block, copy_tokens)

    def take(
        self, request: Request, hits: list[int], num_cached: int, partial: PartialHit | None
    ) -> list[tuple[int, Block]] | None:
        """Gives a request references to what the device has of its prefix, and fresh blocks for the rest.

        :param hits: the device blocks of the full group.
        :param num_cached: the length of the prefix, of which some blocks may have to be fetched.
        :param partial: what is reused behind it; copied here if it is on the device.
        :returns: the blocks to fetch, each behind its position; None: too few are free, and the request has none.
        """
        tables = self._windowed.match(request, num_cached)
        source = [] if partial is None else list(partial.block_ids)
        taken = [*hits, *(block for table in tables for block in table if block != NO_BLOCK), *source]
        self._block_pool.acquire(taken)
        num_full = self._num_blocks(request) - len(hits)
        fresh = self._block_pool.allocate(num_full + self._windowed.num_missing(request, tables, num_cached))
        if fresh is None:
            self._block_pool.free(taken)
            return None
        request.block_ids = hits + fresh[:num_full]
        missing = range(len(hits), num_cached)
        fetched = [(position, (request.keys[position], request.block_ids[position])) for position in missing]
        fetched += self._windowed.fill(request, tables, num_cached, fresh[num_full:])
        if partial is not None and source:
            for block_id, table in zip(source, (request.block_ids, *request.windowed), strict=True):
                self._copy_tokens(block_id, table[num_cached], partial.num_tokens)
            self._block_pool.free(source)
        return fetched

    def share(self, parent: Request, branch: Request) -> None:
        """Gives `branch` references to all blocks of `parent`, as `CopyOnWrite.share` does."""
        self._copy_on_write.share(parent, branch)

    def grow(self, request: Request) -> bool:
        """Gives a running request the blocks that it lacks, takes back those that its window has left, and sees to it
        that it can write to the next one. False when too few are free."""
        self._windowed.drop(request)
        if not self._copy_on_write.part(request):
            return False
        num_full = self._num_blocks(request) - len(request.block_ids)
        num_windowed = self._windowed.num_to_grow(request)
        fresh = self._block_pool.allocate(num_full + num_windowed) if num_full + num_windowed else []
        if fresh is None:
            return False
        request.block_ids += fresh[:num_full]
        self._windowed.grow(request, fresh[num_full:])
        return True

    def num_writable(self, request: Request) -> int:
        """The number of tokens for which a running request has blocks that it may write to."""
        if not self._copy_on_write.may_write(request):
            return 0
        num_blocks = min(map(len, (request.block_ids, *request.windowed)))
        return num_blocks * self._tokens_per_block - request.num_computed

    def at(self, request: Request, positions: range) -> list[Block]:
        """Key and device block of what the request has at these positions, in all KV groups."""
        full = [(request.keys[position], request.block_ids[position]) for position in positions]
        return full + self._windowed.blocks(request, positions)

    def release(self, request: Request) -> None:
        """Takes all blocks back. Published ones stay findable."""
        self._block_pool.free(request.held_blocks)
        request.block_ids, request.windowed = [], []

    def _num_blocks(self, request: Request) -> int:
        return -(-len(request.tokens) // self._tokens_per_block)
