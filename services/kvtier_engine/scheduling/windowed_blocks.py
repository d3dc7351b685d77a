"""Blocks of windowed layers: a sequence holds those that its window sees, and a cached prefix needs no others."""

from collections.abc import Callable, Iterator, Sequence

from kvtier.device.block_pool import BlockPool
from kvtier.identity.keys import BlockKey
from kvtier.offload import Block
from kvtier_engine.model.kv_groups import KVGroups
from kvtier_engine.scheduling.request import NO_BLOCK, Request

Tables = list[list[int]]
"""The device blocks of a sequence by windowed group and position, with `NO_BLOCK` where it holds none."""


class WindowedBlocks:
    """Finds, hands out and takes back blocks of windowed groups. Scheduler thread only; nothing blocks.

    A model without such groups has no tables, and nothing is done here.
    """

    def __init__(self, block_pool: BlockPool, tokens_per_block: int, groups: KVGroups) -> None:
        self._block_pool, self._tokens_per_block = block_pool, tokens_per_block
        self.num_groups = groups.num_windowed
        self._num_seen, self._num_ahead = groups.blocks_seen(tokens_per_block), groups.blocks_ahead(tokens_per_block)

    def __contains__(self, key: BlockKey) -> bool:
        """Whether a block with this key is on the device."""
        return key in self._block_pool

    def first_needed(self, num_blocks: int) -> int:
        """The first block of which a prefix of so many needs more than its full layers. `num_blocks`: none."""
        return max(0, num_blocks - self._num_seen) if self.num_groups else num_blocks

    def longest(self, num_blocks: int, is_there: Callable[[int], bool]) -> int:
        """The length of the longest prefix, of at most so many blocks, whose last window is there.

        :param is_there: whether windowed layers have the block at a position. Asked once for each, at most.
        """
        position = num_blocks - 1
        while position >= self.first_needed(num_blocks):
            if not is_there(position):
                num_blocks = position
            position -= 1
        return num_blocks

    def num_usable(self, request: Request, num_blocks: int, has: Callable[[BlockKey], bool]) -> int:
        """The length of the longest prefix whose last window is there, where full layers have so many blocks.

        :param has: whether a block with this key is there.
        """
        return self.longest(num_blocks, lambda position: all(map(has, self.keys(request, position))))

    def keys(self, request: Request, position: int) -> Sequence[BlockKey]:
        """The keys that windowed groups have for a block of the request, one each."""
        return request.group_keys(position, self.num_groups)[1:]

    def match(self, request: Request, num_blocks: int) -> Tables:
        """Tables of a prefix of so many blocks, with those of its last window that are on the device."""
        first = self.first_needed(num_blocks)
        tables: Tables = [[NO_BLOCK] * first for _ in range(self.num_groups)]
        for position in range(first, num_blocks):
            for table, key in zip(tables, self.keys(request, position), strict=True):
                found = self._block_pool.match_prefix([key])
                table.append(found[0] if found else NO_BLOCK)
        return tables

    def num_missing(self, request: Request, tables: Tables, num_blocks: int) -> int:
        """How many blocks `fill` needs."""
        return sum(1 for _ in self._missing(request, tables, num_blocks))

    def fill(self, request: Request, tables: Tables, num_blocks: int, fresh: Sequence[int]) -> list[tuple[int, Block]]:
        """Gives the request tables that `match` made, and fresh blocks for the rest of the last window and for what it
        computes next.

        :returns: the blocks that have to be fetched, each behind its position.
        """
        fetched: list[tuple[int, Block]] = []
        for block_id, (group, position) in zip(fresh, list(self._missing(request, tables, num_blocks)), strict=True):
            if position < len(tables[group]):
                tables[group][position] = block_id
                fetched.append((position, (self.keys(request, position)[group], block_id)))
            else:
                tables[group].append(block_id)
        request.windowed = tables
        return sorted(fetched)

    def drop(self, request: Request) -> None:
        """Gives back what the request's window has left. Published blocks stay findable."""
        last = self.first_needed(request.num_computed // self._tokens_per_block) - 1
        for table in request.windowed:
            left: list[int] = []
            for position in range(last, -1, -1):
                if table[position] == NO_BLOCK:
                    break
                left.append(table[position])
                table[position] = NO_BLOCK
            self._block_pool.free(left[::-1])

    def num_to_grow(self, request: Request) -> int:
        """How many blocks the request lacks for what it computes next."""
        return sum(1 for _ in self._missing(request, request.windowed, 0)) if request.windowed else 0

    def grow(self, request: Request, fresh: Sequence[int]) -> None:
        """Adds so many blocks."""
        for block_id, (group, _) in zip(fresh, list(self._missing(request, request.windowed, 0)), strict=True):
            request.windowed[group].append(block_id)

    def blocks(self, request: Request, positions: range) -> list[Block]:
        """Key and device block of what windowed groups of the request hold at these positions."""
        return [
            (self.keys(request, position)[group], table[position])
            for position in positions
            for group, table in enumerate(request.windowed)
            if table[position] != NO_BLOCK
        ]

    def _missing(self, request: Request, tables: Tables, num_blocks: int) -> Iterator[tuple[int, int]]:
        """(group, position) of what tables lack: within a prefix of so many blocks, and then one window ahead."""
        num_computed = max(request.num_computed // self._tokens_per_block, num_blocks)
        end = min(-(-len(request.tokens) // self._tokens_per_block), num_computed + 1 + self._num_ahead)
        for group, table in enumerate(tables):
            for position in range(self.first_needed(num_blocks), num_blocks):
                if table[position] == NO_BLOCK:
                    yield group, position
            yield from ((group, position) for position in range(len(table), end))
