"""Keys of the tenants that the gateway acts for, by their secrets."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvtier.build.hashers import tenant_hasher
from kvtier.config import Config
from kvtier.identity.keys import BlockHasher, BlockKey
from kvtier_gateway.keying.tokenising import Tokens
from kvtier_gateway.routing.values import Key

_HEAD_BLOCKS = 4
"""Prompts that begin with the same so many blocks are one conversation: the newest of them is remembered."""
_KEY_BYTES = 96
"""What a key takes."""


class TenantHashers:
    """Hashers by tenant and size of blocks. Any thread."""

    def __init__(self, config: Config) -> None:
        """Raises `ConfigError` when a secret cannot be read. Tenants without one have no keys here."""
        self._config = config
        self._hashers: dict[tuple[str, int], BlockHasher] = {}
        """Grows by single operations only."""
        for name, table in config.tenants.items():
            if table.secret is not None:
                config.chain_secret(name)

    @property
    def tenants(self) -> list[str]:
        """The names of all tenants, those included whose secrets are not here."""
        return list(self._config.tenants)

    def of(self, tenant: str, tokens_per_block: int) -> BlockHasher | None:
        """The tenant's hasher; None where its secret is not here."""
        if tenant not in self._config.tenants or self._config.tenants[tenant].secret is None:
            return None
        found = self._hashers.get((tenant, tokens_per_block))
        if found is None:
            found = self._hashers[tenant, tokens_per_block] = tenant_hasher(self._config, tenant, tokens_per_block)
        return found


class ChainMemory:
    """Keys of the newest prompts: one that goes on, or parts later, is hashed from where it differs. Any thread."""

    def __init__(self, most_bytes: int) -> None:
        """:param most_bytes: what is remembered at most; what was used longest ago goes first."""
        self._most_bytes, self._nbytes = most_bytes, 0  # guarded by _lock
        self._known: OrderedDict[tuple[BlockHasher, bytes], _Chain] = OrderedDict()  # guarded by _lock
        self._lock = threading.Lock()

    def keys_of(self, hasher: BlockHasher, tokens: Tokens) -> list[BlockKey]:
        """What `BlockHasher.hash_blocks` gives."""
        size = hasher.tokens_per_block
        head = hasher, tokens[: _HEAD_BLOCKS * size].tobytes()
        with self._lock:
            known = self._known.get(head)
        same = 0 if known is None else _num_same(known.tokens, tokens) // size
        if known is None or not same:
            keys = hasher.hash_blocks(tokens)
        else:
            keys = known.keys[:same] + hasher.hash_blocks(tokens[same * size :], parent=known.keys[same - 1])
        self._remember(head, _Chain(tokens, keys))
        return keys

    def _remember(self, head: tuple[BlockHasher, bytes], chain: "_Chain") -> None:
        with self._lock:
            before = self._known.pop(head, None)
            self._nbytes += chain.nbytes - (before.nbytes if before is not None else 0)
            self._known[head] = chain
            while self._nbytes > self._most_bytes:
                _, oldest = self._known.popitem(last=False)
                self._nbytes -= oldest.nbytes


@dataclass(frozen=True, slots=True)
class _Chain:
    tokens: Tokens
    keys: list[BlockKey]

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes + _KEY_BYTES * (len(self.keys) + _HEAD_BLOCKS)


def _num_same(one: Tokens, other: Tokens) -> int:
    """The number of leading tokens that are the same."""
    shorter = min(len(one), len(other))
    differ = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(differ[0]) if len(differ) else shorter


def short_keys(keys: Sequence[BlockKey]) -> list[Key]:
    """What KV events call these blocks. About 0.05 us each."""
    if not keys:
        return []
    words = np.frombuffer(b"".join(keys), dtype=">u8").reshape(len(keys), -1)
    found: list[Key] = words[:, -1].tolist()
    return found
