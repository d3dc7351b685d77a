"""KV groups of hybrid models: full attention in one, sliding windows or states in others, over the same device blocks.

Each group has KV of its own for a block of tokens, so each has a key of its own, made of the tokens' chain hash. To
kvtier a device slot is one of vLLM's blocks as one group sees it.

A group of layers with linear attention has one state instead, of all tokens up to some position. What stands for a
block there is the state at the block's end; vLLM keeps it at some of the ends only, and what follows needs no other.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvtier.identity.keys import BlockKey, group_key
from kvtier.offload.jobs import Block

_LABEL = b"kvtier.vllm.group.v1"
NULL_BLOCK = 0
"""vLLM's placeholder for a block that a group does not need any more, or never did."""


@dataclass(frozen=True, slots=True)
class KVGroups:
    """How many groups there are, and how many device blocks."""

    num_groups: int
    num_blocks: int
    of_states: frozenset[int] = frozenset()
    """The groups that have states instead of KV: never all groups."""

    @property
    def of_tokens(self) -> list[int]:
        """Groups that have KV of every block."""
        return [group for group in range(self.num_groups) if group not in self.of_states]

    def keys(self, keys: Iterable[BlockKey]) -> list[BlockKey]:
        """The keys of all groups, block by block. Where there is one group, they are the request's own keys."""
        if self.num_groups == 1:
            return list(keys)
        return [group_key(key, _LABEL, group) for key in keys for group in range(self.num_groups)]

    def blocks(self, keys: Sequence[BlockKey], tables: Sequence[Sequence[int]], span: range) -> list[Block]:
        """Key and device slot of all blocks that the groups have there.

        :param keys: of the request's blocks from the first one on, at least to the end of `span`.
        :param tables: the request's device blocks, by group. They may end before the span does.
        :param span: positions in both.
        """
        return [
            self.block(keys[position], group, table[position])
            for position in span
            for group, table in enumerate(tables)
            if position < len(table) and table[position] != NULL_BLOCK
        ]

    def block(self, key: BlockKey, group: int, device_block: int) -> Block:
        """What a group has of the request's block with this key: its key and device slot."""
        of_group = key if self.num_groups == 1 else group_key(key, _LABEL, group)
        return of_group, group * self.num_blocks + device_block

    def without_states(self, tables: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """Returns the tables, empty for groups of states: there, a table does not say which position a state is of."""
        return [() if group in self.of_states else table for group, table in enumerate(tables)]

    def device_blocks(self, slots: Iterable[int]) -> list[int]:
        """vLLM's blocks that these device slots are in."""
        return [self.device_block(slot) for slot in slots]

    def device_block(self, slot: int) -> int:
        """vLLM's block that this device slot is in."""
        return slot % self.num_blocks

    def slots(self, device_blocks: Iterable[int]) -> Iterator[int]:
        """Device slots of all groups that are in these blocks of vLLM's."""
        firsts = range(0, self.num_groups * self.num_blocks, self.num_blocks)
        return (first + block for block in device_blocks for first in firsts)
