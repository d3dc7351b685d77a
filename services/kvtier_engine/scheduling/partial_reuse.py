"""Reuse of the leading tokens of a block that differs from the prompt only later."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from kvtier.device.block_pool import BlockPool
from kvtier.identity.keys import BlockKey
from kvtier.offload import Hierarchy
from kvtier_engine.scheduling.child_index import ChildIndex, Sibling
from kvtier_engine.scheduling.request import Request, SiblingLookup, keys_of_groups

_MOST_SIBLINGS = 8
"""Looked at for one that is on the device, among those with most tokens in common."""


class Unknown(enum.Enum):
    """The answer of a search that is not over."""

    YET = enum.auto()


@dataclass(frozen=True, slots=True)
class PartialHit:
    """A block whose first tokens are the next ones of a prompt."""

    key: BlockKey
    num_tokens: int
    """How many of its tokens are reused, at least one, and fewer than it has unless it is the prompt's own block."""
    block_ids: Sequence[int]
    """The device block that it is in, for each KV group; none when it has to be fetched from below."""

    @property
    def is_below(self) -> bool:
        """Whether it has to be fetched."""
        return not self.block_ids


class PartialReuse:
    """Finds partial hits. Scheduler thread only; nothing blocks.

    What is reused is copied into a block of the request's own, since the rest of that block will be other tokens': that
    costs a copy of at most one block a request, and at most one more lookup of a block below the device.
    """

    def __init__(
        self,
        block_pool: BlockPool,
        tokens_per_block: int,
        *,
        max_blocks: int,
        hierarchy: Hierarchy | None = None,
        num_windowed: int = 0,
    ) -> None:
        """
        :param max_blocks: how many blocks are remembered by their tokens; several times what the device has, since
            those that have left it are found below.
        :param hierarchy: the tiers below; None looks at the device only.
        :param num_windowed: how many windowed groups there are, of each of which a block of its own is reused.
        """
        self._block_pool, self._hierarchy, self._num_windowed = block_pool, hierarchy, num_windowed
        self._tokens_per_block = tokens_per_block
        self._index = ChildIndex(max_blocks)

    def note_full(self, request: Request, blocks: range) -> None:
        """The blocks of a request at these positions can be reused from now on, by their tokens."""
        size = self._tokens_per_block
        if request.hasher is None:
            return
        for position in blocks:
            parent = request.keys[position - 1] if position else request.hasher
            tokens = request.tokens[position * size : (position + 1) * size]
            self._index.add(parent, request.keys[position], tokens)

    def note_used(self, keys: Sequence[BlockKey]) -> None:
        """These blocks were hit."""
        self._index.touch(keys)

    def find(self, request: Request, position: int) -> PartialHit | Unknown | None:
        """A block with the first tokens of the request's block at `position`; ask again while it is not known.

        :param position: the first block of the request that is neither on the device nor fetched.
        """
        # The last token of a prompt is computed, since the answer follows from its logits.
        start = position * self._tokens_per_block
        most = min(self._tokens_per_block, len(request.tokens) - 1 - start)
        if request.hasher is None or most <= 0 or position > len(request.keys):
            return None
        parent = request.keys[position - 1] if position else request.hasher
        siblings = list(islice(self._index.siblings(parent, request.tokens[start : start + most]), _MOST_SIBLINGS))
        here = next((hit for hit in map(self._on_device, siblings) if hit is not None), None)
        below = siblings[0] if siblings else None
        # Less than half a block more is not worth the wait for it.
        gain = 0 if below is None else below.num_tokens - (here.num_tokens if here is not None else 0)
        if below is None or self._hierarchy is None or 2 * gain < self._tokens_per_block:
            return here
        is_worth = self._is_worth_fetching(request, below.key, self._hierarchy)
        if is_worth is None:
            return Unknown.YET
        return PartialHit(below.key, below.num_tokens, ()) if is_worth else here

    def cancel(self, request: Request) -> None:
        """Forgets what was asked and answered."""
        lookup = request.sibling_lookup
        if self._hierarchy is not None and lookup is not None and lookup.ticket is not None:
            self._hierarchy.cancel_lookup(lookup.ticket)
        request.sibling_lookup = None

    def reset(self) -> None:
        """Forgets all blocks."""
        self._index.clear()

    def _on_device(self, sibling: Sibling) -> PartialHit | None:
        keys = keys_of_groups(sibling.key, self._num_windowed)
        found = self._block_pool.match_prefix(keys)
        return PartialHit(sibling.key, sibling.num_tokens, found) if len(found) == len(keys) else None

    def _is_worth_fetching(self, request: Request, key: BlockKey, hierarchy: Hierarchy) -> bool | None:
        lookup = request.sibling_lookup
        if lookup is None or lookup.key != key:
            self.cancel(request)
            ticket = hierarchy.start_lookup(keys_of_groups(key, self._num_windowed))
            lookup = request.sibling_lookup = SiblingLookup(key, ticket)
        if lookup.ticket is not None:
            statuses = hierarchy.poll_lookup(lookup.ticket)
            if statuses is None:
                return None
            lookup.ticket, lookup.is_worth_fetching = None, hierarchy.plan_fetch(statuses, 1) == len(statuses)
        return lookup.is_worth_fetching
