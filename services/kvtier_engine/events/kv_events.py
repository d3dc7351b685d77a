"""What changes on the device, in host memory and on disk, as events."""

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtier.build.tiers import DISK
from kvtier.clock import WALL
from kvtier.device.block_pool import BlockPool
from kvtier.identity.keys import BlockKey
from kvtier.offload import ContentChanges, Hierarchy, runs_of_chains
from kvtier.offload.messages import HOST
from kvtier_engine.events.event_form import (
    CLEARED,
    DEVICE_PLACE,
    DISK_PLACE,
    HOST_PLACE,
    Event,
    HashForm,
    external_hash,
    pack_batch,
    removed,
    stored,
)

DEVICE = "device"
_PLACES = {DEVICE: DEVICE_PLACE, HOST: HOST_PLACE, DISK: DISK_PLACE}
_MOST_CHANGES = 2048
"""Changes that one batch tells of: a few milliseconds. More are told by the next batches."""
_SWEEP_AT = 1024
"""Blocks that are remembered in any case."""


class Publisher(Protocol):
    """The way of batches to subscribers: `EventPublisher`."""

    @property
    def has_room(self) -> bool: ...

    def publish(self, batch: bytes) -> None: ...


@dataclass(frozen=True, slots=True)
class _Block:
    """A block as events describe it. About 400 bytes, with 16 tokens."""

    block_hash: int | bytes
    parent_hash: int | bytes | None
    position: int
    """The block's number in its prompt."""
    tokens: "array[int]"
    family: None = None


class KVEvents:
    """Compares what has changed with what listeners have been told. Scheduler thread only; nothing blocks.

    Blocks are described while a request has their tokens. What an earlier process left on disk is told of when a
    request has loaded it.
    """

    def __init__(
        self,
        publisher: Publisher,
        block_pool: BlockPool,
        tokens_per_block: int,
        hashes: HashForm,
        *,
        hierarchy: Hierarchy | None = None,
    ) -> None:
        """:param hierarchy: the tiers below; None tells of the device only."""
        self._publisher, self._block_pool, self._hierarchy = publisher, block_pool, hierarchy
        self._size, self._hashes = tokens_per_block, hashes
        self._changes = hierarchy.watch() if hierarchy is not None else ContentChanges(())
        self._waiting: deque[tuple[str, BlockKey]] = deque()
        """Changes that were taken, and not yet told."""
        self._told: dict[str, set[BlockKey]] = {tier: set() for tier in (DEVICE, *self._changes.tiers)}
        """What listeners believe to be in each tier."""
        self._blocks: dict[BlockKey, _Block] = {}
        self._sweep_at = _SWEEP_AT
        """The size of `_blocks` at which those that are nowhere are removed."""
        self._begins_anew = True
        """Whether listeners have to forget what they believe: at first, what an earlier process told them."""

    def note_full(self, keys: Sequence[BlockKey], tokens: Sequence[int], blocks: range) -> None:
        """The blocks of a request at these positions are on the device.

        :param keys: of the request's blocks, from the first on, as are `tokens`.
        """
        for position in blocks:
            key = keys[position]
            if key not in self._blocks:
                self._blocks[key] = _Block(
                    external_hash(key, self._hashes),
                    external_hash(keys[position - 1], self._hashes) if position else None,
                    position,
                    array("I", tokens[position * self._size : (position + 1) * self._size]),
                )
        for tier in self._told:
            self._changes.note(tier, keys[blocks.start : blocks.stop])

    def note_evicted(self, key: BlockKey) -> None:
        """The device loses this block."""
        self._changes.note(DEVICE, [key])

    def note_reset(self) -> None:
        """The device has forgotten all blocks, and the tiers below are about to."""
        self._begins_anew = True

    def publish(self) -> None:
        """Tells what has changed since the last call, as it is at this moment: what came and went is not in it.

        Where the publisher has no room, listeners are told to forget as soon as it has, and then what is there.
        """
        if not (self._changes or self._waiting or self._begins_anew):
            return
        self._waiting.extend(self._changes.take())
        if not self._publisher.has_room:  # what waits must not grow without bound
            self._waiting.clear()
            self._begins_anew = True
            return
        events = self._beginning() if self._begins_anew else []
        events += self._news([self._waiting.popleft() for _ in range(min(len(self._waiting), _MOST_CHANGES))])
        self._sweep()
        if events:
            self._publisher.publish(pack_batch(events, WALL()))

    def _beginning(self) -> list[Event]:
        """Makes listeners forget; what is there, and has a description, is told anew."""
        self._begins_anew = False
        for tier, told in self._told.items():
            self._waiting.extend((tier, key) for key in {*told, *self._blocks})
            told.clear()
        return [CLEARED]

    def _news(self, changes: Sequence[tuple[str, BlockKey]]) -> list[Event]:
        gone: dict[str, list[int | bytes]] = {}
        come: dict[str, list[_Block]] = {}
        for tier, key in changes:
            told, is_there = self._told[tier], self._is_in(tier, key)
            block = self._blocks.get(key)
            if is_there and block is not None and key not in told:
                told.add(key)
                come.setdefault(tier, []).append(block)
            elif not is_there and key in told:
                told.remove(key)
                gone.setdefault(tier, []).append(external_hash(key, self._hashes))
        return [
            *(removed(hashes, _PLACES[tier]) for tier, hashes in gone.items()),
            *(self._stored(tier, run) for tier, blocks in come.items() for run in runs_of_chains(blocks)),
        ]

    def _stored(self, tier: str, run: Sequence[_Block]) -> Event:
        hashes = [block.block_hash for block in run]
        tokens = [token for block in run for token in block.tokens]
        return stored(hashes, run[0].parent_hash, tokens, self._size, _PLACES[tier])

    def _is_in(self, tier: str, key: BlockKey) -> bool:
        if tier == DEVICE:
            return key in self._block_pool
        return self._hierarchy is not None and self._hierarchy.has(tier, key)

    def _sweep(self) -> None:
        """Forgets the descriptions of blocks that are below host memory or nowhere."""
        if len(self._blocks) <= self._sweep_at or self._waiting:
            return
        holds: Callable[[BlockKey], bool] = self._hierarchy.holds if self._hierarchy is not None else lambda _: False
        self._blocks = {key: block for key, block in self._blocks.items() if key in self._block_pool or holds(key)}
        self._sweep_at = max(_SWEEP_AT, 2 * len(self._blocks))
