"""Which keys the hashes in an engine's KV events stand for."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvtier.identity.keys import BlockHasher, BlockKey
from kvtier_gateway.keying.tenants import short_keys
from kvtier_gateway.routing.values import Key, Medium

MAX_BLOCKS = 1 << 18
"""Blocks of one vLLM engine that are followed; each takes about 300 bytes."""
_WHOLE = frozenset((None, "full_attention", "mla_attention", "sink_full_attention"))
"""Kinds of attention that need a prefix as a whole. None: an engine that does not say."""
_NO_GROUP = -1
"""The group before the first event."""

Event = Mapping[str, Any]
HasherOf = Callable[[str, int], BlockHasher | None]
"""Gives the hasher of a tenant for blocks of so many tokens; None where the gateway does not have the secret."""


class BlockNames(Protocol):
    """Names of blocks in the events of one engine. What these calls raise for malformed events: see `events_in`."""

    def stored(self, event: Event, medium: Medium) -> Sequence[Key]:
        """The keys of blocks that came, as far as they are known."""

    def removed(self, event: Event, medium: Medium) -> Sequence[Key]:
        """The keys of blocks that went."""

    def cleared(self) -> None:
        """The engine has nothing any more, or nobody knows what."""


class OwnNames:
    """Names of kvtier's own engine: each is the end of the block's key."""

    def stored(self, event: Event, medium: Medium) -> Sequence[Key]:
        """Knows them all."""
        hashes: list[int | bytes] = event["block_hashes"]
        return [each if isinstance(each, int) else int.from_bytes(each[-8:], "big") for each in hashes]

    removed = stored

    def cleared(self) -> None:
        """Remembers nothing."""


class _Block(NamedTuple):
    key: BlockKey
    hasher: BlockHasher
    media: frozenset[Medium]


class VllmNames:
    """Names of a vLLM engine, which are its own: keys are computed from the tokens that its events have.

    A prompt's first block says whose it is: gateway and connector put the tenant's name into `cache_salt`, which vLLM
    tells with it. Later blocks name their parent. Blocks with an adapter, media or a client's own salt have keys that
    the gateway does not make, so neither they nor what follows them is known here. Not safe for threads.
    """

    def __init__(self, hasher_of: HasherOf, only_tenant: str | None, max_blocks: int = MAX_BLOCKS) -> None:
        """
        :param only_tenant: whose blocks without a salt are: of the one tenant that the engine serves. None: nobody's.
        :param max_blocks: beyond so many, blocks are not known until others go.
        """
        self._hasher_of, self._only_tenant, self._max_blocks = hasher_of, only_tenant, max_blocks
        self._known: dict[int | bytes, _Block] = {}
        """Blocks that are followed, by vLLM's hash."""
        self._group: int | None = _NO_GROUP
        """The first KV group whose attention needs a prefix as a whole. No other group is followed."""

    def stored(self, event: Event, medium: Medium) -> Sequence[Key]:
        """Hashes what is new: about 1 us for each block of 16 tokens, and 0.1 us for those that are known."""
        hashes, tokens, size = event["block_hashes"], event["token_ids"], event["block_size"]
        if not self._follows(event) or len(tokens) != size * len(hashes):
            return []
        num_known = next((i for i, each in enumerate(hashes) if each not in self._known), len(hashes))
        keys = [self._note(each, medium) for each in hashes[:num_known]]
        keys += self._learn(event, num_known, medium)
        return short_keys(keys)

    def removed(self, event: Event, medium: Medium) -> Sequence[Key]:
        """Forgets blocks that are in no medium any more."""
        if event.get("group_idx") != self._group:
            return []
        keys: list[BlockKey] = []
        for each in event["block_hashes"]:
            block = self._known.get(each)
            if block is None:
                continue
            keys.append(block.key)
            if media := block.media - {medium}:
                self._known[each] = block._replace(media=media)
            else:
                del self._known[each]
        return short_keys(keys)

    def cleared(self) -> None:
        """Forgets all blocks."""
        self._known.clear()

    def _follows(self, event: Event) -> bool:
        if event.get("kv_cache_spec_kind") not in _WHOLE:
            return False
        group: int | None = event.get("group_idx")
        if self._group == _NO_GROUP:
            self._group = group
        return group == self._group

    def _note(self, block_hash: int | bytes, medium: Medium) -> BlockKey:
        block = self._known[block_hash]
        if medium not in block.media:
            self._known[block_hash] = block._replace(media=block.media | {medium})
        return block.key

    def _learn(self, event: Event, first: int, medium: Medium) -> Sequence[BlockKey]:
        """The keys of blocks from the `first` new one on, as far as somebody could ask for them."""
        hashes, size = event["block_hashes"][first:], event["block_size"]
        if not hashes:
            return []
        extras = (event.get("extra_keys") or [None] * (first + len(hashes)))[first:]
        parent_hash = event["block_hashes"][first - 1] if first else event["parent_block_hash"]
        hasher: BlockHasher | None
        if parent_hash is None:
            tenant = self._tenant_of(extras[0])
            hasher, parent = (None if tenant is None else self._hasher_of(tenant, size)), None
            others = extras[1:]
        else:
            known = self._known.get(parent_hash)
            hasher, parent = (None, None) if known is None else (known.hasher, known.key)
            others = extras
        if hasher is None or hasher.tokens_per_block != size:
            return []
        num_plain = len(extras) - len(others) + next((i for i, each in enumerate(others) if each), len(others))
        num = min(num_plain, self._max_blocks - len(self._known))
        tokens = np.array(event["token_ids"][first * size : (first + num) * size], dtype=np.uint32)
        keys = hasher.hash_blocks(tokens, parent=parent)
        media = frozenset((medium,))
        self._known.update((each, _Block(key, hasher, media)) for each, key in zip(hashes, keys, strict=False))
        return keys

    def _tenant_of(self, extra: Sequence[Any] | None) -> str | None:
        """The tenant whose prompt begins with this block, by what vLLM hashes beside tokens; None: nobody's here."""
        if not extra:
            return self._only_tenant
        (salt,) = extra if len(extra) == 1 else (None,)
        return salt if isinstance(salt, str) else None
