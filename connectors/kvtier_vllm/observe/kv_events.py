"""KV events of what this engine holds in host memory and on disk: routers that place requests by prefix count it, too.

As vLLM's own events tell of the device: by vLLM's block hashes, with tokens, for each KV group.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import ExternalBlockHash, to_event_extra_keys
from vllm.v1.request import Request

from kvtier.build.tiers import DISK
from kvtier.identity.keys import BlockKey
from kvtier.offload import ContentChanges, Directory, runs_of_chains
from kvtier.offload.messages import HOST
from kvtier_vllm import compat, request_hashes
from kvtier_vllm.kv.groups import KVGroups


class _Place(NamedTuple):
    medium: str
    locality: str | None


_PLACES = {HOST: _Place(MEDIUM_CPU, None), DISK: _Place(MEDIUM_STORAGE, "LOCAL")}
"""The names of the tiers in events, which are those that vLLM's native offloading uses for its own."""
_SWEEP_AT = 1024
"""Blocks that are remembered in any case."""


class _Origin(NamedTuple):
    """What events say of the request that a block comes from."""

    lora_id: int | None
    lora_name: str | None
    session_id: str | None


@dataclass(frozen=True, slots=True)
class _Block:
    """A block as events describe it. About half a KiB, with 32 tokens."""

    block_hash: ExternalBlockHash
    parent_hash: ExternalBlockHash | None
    group: int
    position: int
    """The block's number in its prompt, counted in blocks from the beginning."""
    tokens: "array[int]"
    inputs: tuple[Any, ...] | None
    """What the block's hash is made of beside the tokens."""
    origin: _Origin

    @property
    def family(self) -> tuple[int, _Origin]:
        """What all blocks of one event have in common."""
        return self.group, self.origin


class KVEvents:
    """Turns the directory's changes into events. Scheduler thread only.

    Our keys say nothing of vLLM's hashes, so blocks are described while a request is there that has them. One that
    nobody has described, as what an earlier process left on disk, is told of when a request names it.
    """

    def __init__(self, tokens_per_block: int, groups: KVGroups, kinds: Sequence[tuple[str, int | None]]) -> None:
        """:param kinds: of attention, by group: its name, and its window."""
        self._size, self._groups, self._kinds = tokens_per_block, groups, kinds
        self._kv: KVCacheManager | None = None
        self._device_cache: object = None
        """vLLM's, as of the last `take`."""
        self._directory: Directory | None = None
        self._changes = ContentChanges(())
        self._awaited: Callable[[], set[BlockKey]] = set
        self._here: dict[BlockKey, _Block] = {}
        """Blocks in host memory."""
        self._coming: dict[BlockKey, _Block] = {}
        """Blocks that may come to host memory, and some that nobody awaits any more."""
        self._sweep_at = _SWEEP_AT
        """The size of `_coming` at which blocks that nobody awaits are removed."""
        self._told: dict[str, dict[BlockKey, tuple[int, ExternalBlockHash]]] = {}
        """What listeners believe to be in a tier, by tier: each block with its group and hash."""

    @property
    def has_news(self) -> bool:
        """Whether `take` may have something."""
        return bool(self._changes)

    def bind(self, kv: KVCacheManager) -> None:
        self._kv = kv

    def watch(self, directory: Directory, awaited: Callable[[], set[BlockKey]]) -> None:
        """Tells of this directory's tiers from now on.

        :param awaited: blocks that will be saved or loaded, but that the directory may not hold yet.
        """
        self._directory, self._awaited, self._changes = directory, awaited, directory.watch()
        self._told = {tier: {} for tier in self._changes.tiers}

    def describe(self, request: Request, keys: Sequence[BlockKey], span: range) -> None:
        """Blocks of a request that may soon be in a tier, or are in one that nobody was told of.

        :param keys: of all groups, block by block.
        :param span: the blocks' positions in the request.
        """
        fresh = [n for n, key in enumerate(keys) if any(key not in told for told in self._told.values())]
        if not fresh:
            return
        assert self._kv is not None
        before = max(span.start - 1, 0)
        hashes = request_hashes.event_hashes(request, self._kv, range(before, span.stop), self._size)
        lora = request.lora_request
        origin = _Origin(lora and lora.adapter_id, lora and lora.name, request.session_id)
        for number in fresh:
            key, index = keys[number], span.start - before + number // self._groups.num_groups
            if index >= len(hashes):
                break
            if key in self._here or key in self._coming:
                continue
            position = before + index
            self._coming[key] = _Block(
                block_hash=hashes[index],
                parent_hash=hashes[index - 1] if position else None,
                group=number % self._groups.num_groups,
                position=position,
                tokens=array("I", request.all_token_ids[position * self._size : (position + 1) * self._size]),
                inputs=request_hashes.hash_inputs(request, position, self._size),
                origin=origin,
            )
        for tier in self._changes.tiers:
            self._changes.note(tier, [keys[number] for number in fresh])

    def take(self) -> list[KVCacheEvent]:
        """What has changed since the last call, as it is at this moment: what came and went meanwhile is not in it."""
        if self._kv is None or self._directory is None:
            return []
        gone: dict[tuple[str, int], list[ExternalBlockHash]] = {}
        come: dict[str, list[_Block]] = {}
        before, self._device_cache = self._device_cache, compat.device_cache(self._kv)
        if before is not self._device_cache:  # vLLM's reset event names no medium: listeners may forget ours, too
            for tier, told in self._told.items():
                self._changes.note(tier, told)
                for group, block_hash in told.values():
                    gone.setdefault((tier, group), []).append(block_hash)
                told.clear()
        for tier, key in self._changes.take():
            told, is_there = self._told[tier], self._directory.has(tier, key)
            block = self._here.get(key) or self._coming.get(key)
            if is_there and block is not None and key not in told:
                told[key] = block.group, block.block_hash
                come.setdefault(tier, []).append(block)
            elif not is_there and key in told:
                group, block_hash = told.pop(key)
                gone.setdefault((tier, group), []).append(block_hash)
            if tier == HOST and block is not None and is_there != (key in self._here):
                old, new = (self._coming, self._here) if is_there else (self._here, self._coming)
                new[key] = old.pop(key)
        self._sweep(self._directory)
        removed = [self._removed(tier, group, hashes) for (tier, group), hashes in gone.items()]
        return [*removed, *(self._stored(tier, run) for tier, blocks in come.items() for run in runs_of_chains(blocks))]

    def _sweep(self, directory: Directory) -> None:
        """Forgets blocks that do not come: so what is remembered is bounded by what the tiers and the device hold."""
        if len(self._coming) > self._sweep_at:
            awaited = self._awaited()
            self._coming = {key: b for key, b in self._coming.items() if key in awaited or directory.holds(key)}
            self._sweep_at = max(_SWEEP_AT, 2 * len(self._coming))

    def _stored(self, tier: str, run: Sequence[_Block]) -> BlockStored:
        first, place = run[0], _PLACES[tier]
        kind, window = self._kinds[first.group]
        return BlockStored(
            block_hashes=[block.block_hash for block in run],
            parent_block_hash=first.parent_hash,
            token_ids=[token for block in run for token in block.tokens],
            block_size=self._size,
            lora_id=first.origin.lora_id,
            medium=place.medium,
            lora_name=first.origin.lora_name,
            extra_keys=to_event_extra_keys([block.inputs for block in run]),
            group_idx=first.group,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
            locality=place.locality,
            session_id=first.origin.session_id,
        )

    def _removed(self, tier: str, group: int, hashes: list[ExternalBlockHash]) -> BlockRemoved:
        place = _PLACES[tier]
        return BlockRemoved(block_hashes=hashes, medium=place.medium, group_idx=group, locality=place.locality)
