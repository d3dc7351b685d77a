"""What a router makes of vLLM's KV events: which blocks an engine has, by medium."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent

GPU, CPU, STORAGE = "GPU", "CPU", "STORAGE"


class Place(NamedTuple):
    """The place of a block in a medium."""

    group: int
    block_hash: int | bytes


class Told(NamedTuple):
    """What an event says of a block, beside where it is."""

    parent: int | bytes | None
    tokens: tuple[int, ...]
    extra: tuple[Any, ...] | None
    of: tuple[Any, ...]
    """LoRA id and name, kind of attention, window and session."""


class Router:
    """Believes what it is told."""

    def __init__(self) -> None:
        self.blocks: dict[str, dict[Place, Told]] = {GPU: {}, CPU: {}, STORAGE: {}}
        """By medium: what is there."""
        self.known: dict[str, dict[Place, Told]] = {GPU: {}, CPU: {}, STORAGE: {}}
        """What was ever said of it."""
        self.counts: Counter[tuple[str, str]] = Counter()
        """Blocks, by medium and kind of event."""
        self._block_size = 1

    def hear(self, events: Iterable[KVCacheEvent]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                for blocks in self.blocks.values():
                    blocks.clear()
            elif isinstance(event, BlockRemoved):
                self._remove(event)
            else:
                assert isinstance(event, BlockStored)
                self._store(event)

    def compare_with_device(self, medium: str) -> None:
        """What vLLM says of a block on the device is said of it in this medium. None is there that never was on it."""
        ours, theirs = self.known[medium], self.known[GPU]
        assert {place: ours[place] for place in ours if place in theirs} == {
            place: theirs[place] for place in ours if place in theirs
        }
        assert {place for place in ours if place.group == 0} <= theirs.keys()

    def places(self, medium: str) -> set[Place]:
        return set(self.blocks[medium])

    def num_hits(
        self, tokens: Sequence[int], *media: str, groups: int = 1, salt: str | None = None, adapter: str | None = None
    ) -> int:
        """Leading blocks of a prompt that all groups have in one of these media. Found as routers do, by tokens."""
        children = {
            (place.group, told.parent, told.tokens, told.extra): place.block_hash
            for medium in media
            for place, told in self.blocks[medium].items()
        }
        parent: int | bytes | None = None
        for number, start in enumerate(range(0, len(tokens), self._block_size)):
            block = tuple(tokens[start : start + self._block_size])
            extra = tuple(each for each in (adapter, None if number else salt) if each is not None) or None
            found = {children.get((group, parent, block, extra)) for group in range(groups)}
            if None in found:
                return number
            (parent,) = found
        return len(tokens) // self._block_size

    def _store(self, event: BlockStored) -> None:
        assert event.medium is not None
        assert event.group_idx is not None
        size, parent = event.block_size, event.parent_block_hash
        self._block_size = size
        if len(event.token_ids) != size * len(event.block_hashes):
            # vLLM leaves out blocks that no window will look at, but not their tokens: who knows which is which?
            assert event.medium == GPU
            assert event.kv_cache_spec_sliding_window is not None
            return
        extra = event.extra_keys or [None] * len(event.block_hashes)
        for index, (block_hash, keys) in enumerate(zip(event.block_hashes, extra, strict=True)):
            told = Told(
                parent,
                tuple(event.token_ids[index * size : (index + 1) * size]),
                None if keys is None else tuple(keys),
                (
                    event.lora_id,
                    event.lora_name,
                    event.kv_cache_spec_kind,
                    event.kv_cache_spec_sliding_window,
                    event.session_id,
                ),
            )
            place = Place(event.group_idx, block_hash)
            assert self.known[event.medium].setdefault(place, told) == told, "told otherwise before"
            self.blocks[event.medium][place] = told
            self.counts[event.medium, "stored"] += 1
            parent = block_hash

    def _remove(self, event: BlockRemoved) -> None:
        assert event.medium is not None
        assert event.group_idx is not None
        for block_hash in event.block_hashes:
            self.blocks[event.medium].pop(Place(event.group_idx, block_hash), None)
            self.counts[event.medium, "removed"] += 1
