"""Keys of KV blocks: which tokens, for whom (prefix chain), and where they are stored (store key).

    root  = HMAC-SHA-256(secret, "kvtier.root.v1" || u32le tokens_per_block || u32le len(salt) || salt)
    H_-1  = 32 zero bytes
    H_i   = SHA-256(root || H_{i-1} || tokens_i as uint32 little endian || extra_i)
    extra = u32le length || canonical msgpack [[kind, bytes, offset], ...]; none = four zero bytes
    ext   = HMAC-SHA-256(root, "kvtier.ext.v1" || digest)

The root is in every block, so that nobody who sees one hash can test guesses of the next block
without the tenant's secret. Nothing here depends on the process, the machine or PYTHONHASHSEED;
`tests/identity/test_keys.py` pins golden vectors.
"""

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NewType

import msgpack
import numpy as np
import numpy.typing as npt

from kvtier.clock import WALL, Clock
from kvtier.errors import InvalidInputError

ChainHash = NewType("ChainHash", bytes)
"""32 bytes: a block's place in a prefix chain, or an engine-supplied digest keyed with the root."""
TenantId = NewType("TenantId", bytes)
"""16 bytes, a digest of the tenant's name. Not secret."""
BlockKey = NewType("BlockKey", bytes)
"""48 bytes: tenant id || chain hash. What an engine calls a block, whichever ranks have their part of it."""
NamespaceId = NewType("NamespaceId", bytes)
"""16 bytes that say which bytes a block holds (`kvtier.identity.namespace`)."""
StoreKey = NewType("StoreKey", bytes)
"""64 bytes: tenant id || namespace id || chain hash. What every tier is asked for."""

TENANT_ID_BYTES = 16
NAMESPACE_ID_BYTES = 16
CHAIN_HASH_BYTES = 32
STORE_KEY_BYTES = TENANT_ID_BYTES + NAMESPACE_ID_BYTES + CHAIN_HASH_BYTES
BLOCK_KEY_BYTES = TENANT_ID_BYTES + CHAIN_HASH_BYTES
MAX_TOKENS_PER_BLOCK = 65_536
NUMPY_PAYS_FROM = 256
"""Keys at a time; for fewer, numpy costs more than it saves, above all where a copy has just emptied the caches."""
CHAIN_START = ChainHash(bytes(CHAIN_HASH_BYTES))
"""The parent of a chain's first block."""

_ROOT_LABEL = b"kvtier.root.v1"
_EXTERNAL_LABEL = b"kvtier.ext.v1"
_TENANT_LABEL = b"kvtier.tenant.v1"
_ADAPTER = "lora"
_NO_EXTRAS = bytes(4)
_TENANT_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_UINT32_MAX = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Extra:
    """What a block's KV depends on besides its tokens: a LoRA id, the content hash of an image."""

    kind: str
    data: bytes
    offset: int
    """Token offset inside the block, from 0."""


def tenant_id(name: str) -> TenantId:
    """The id of the tenant called `name`: lower-case letters, digits, `-` and `_`, at most 63."""
    if not _TENANT_NAME.fullmatch(name):
        raise InvalidInputError(
            f"tenant name {name!r}: use 1 to 63 of a-z, 0-9, '-', '_', starting with a letter or digit"
        )
    return TenantId(hashlib.sha256(_TENANT_LABEL + name.encode()).digest()[:TENANT_ID_BYTES])


def tenant_of(key: bytes) -> TenantId:
    """The tenant that a store key or a block key names."""
    return TenantId(key[:TENANT_ID_BYTES])


def are_of_tenant(keys: Sequence[StoreKey], tenant: TenantId) -> bool:
    """Whether all of these name this tenant. About 0.03 us per key of many."""
    if len(keys) < NUMPY_PAYS_FROM:
        return all(key.startswith(tenant) for key in keys)
    rows = np.frombuffer(b"".join(keys), dtype=np.uint64).reshape(len(keys), -1)
    named = np.frombuffer(tenant, dtype=np.uint64)
    return bool((rows[:, : len(named)] == named).all())


def store_key(tenant: TenantId, namespace: NamespaceId, chain_hash: ChainHash) -> StoreKey:
    """Joins the three parts. Raises `InvalidInputError` when one has the wrong length."""
    key = tenant + namespace + chain_hash
    if len(tenant) != TENANT_ID_BYTES or len(key) != STORE_KEY_BYTES or len(chain_hash) != CHAIN_HASH_BYTES:
        raise InvalidInputError(
            f"store key of {len(tenant)} + {len(namespace)} + {len(chain_hash)} bytes: "
            f"needs {TENANT_ID_BYTES} + {NAMESPACE_ID_BYTES} + {CHAIN_HASH_BYTES}"
        )
    return StoreKey(key)


def block_key(tenant: TenantId, chain_hash: ChainHash) -> BlockKey:
    """Joins both parts. Raises `InvalidInputError` when one has the wrong length."""
    if len(tenant) != TENANT_ID_BYTES or len(chain_hash) != CHAIN_HASH_BYTES:
        raise InvalidInputError(
            f"block key of {len(tenant)} + {len(chain_hash)} bytes: needs {TENANT_ID_BYTES} + {CHAIN_HASH_BYTES}"
        )
    return BlockKey(tenant + chain_hash)


def split_block_key(key: BlockKey) -> tuple[TenantId, ChainHash]:
    """The inverse of `block_key`."""
    if len(key) != BLOCK_KEY_BYTES:
        raise InvalidInputError(f"block key of {len(key)} bytes: needs {BLOCK_KEY_BYTES}")
    return TenantId(key[:TENANT_ID_BYTES]), ChainHash(key[TENANT_ID_BYTES:])


def group_key(key: BlockKey, label: bytes, group: int) -> BlockKey:
    """What a KV group calls its part of the block with this key.

    :param label: whose groups these are: the same number means another thing to another engine.
    """
    tenant, chain_hash = split_block_key(key)
    return BlockKey(tenant + hashlib.sha256(label + group.to_bytes(2, "big") + chain_hash).digest())


def rank_keys(keys: Iterable[BlockKey], namespace: NamespaceId) -> list[StoreKey]:
    """What tiers call these blocks' parts in one rank."""
    if len(namespace) != NAMESPACE_ID_BYTES:
        raise InvalidInputError(f"namespace id of {len(namespace)} bytes: needs {NAMESPACE_ID_BYTES}")
    whole = list(keys)
    if any(len(key) != BLOCK_KEY_BYTES for key in whole):
        raise InvalidInputError(f"block keys of {sorted(set(map(len, whole)))} bytes: need {BLOCK_KEY_BYTES}")
    return [StoreKey(key[:TENANT_ID_BYTES] + namespace + key[TENANT_ID_BYTES:]) for key in whole]


def split_store_key(key: StoreKey) -> tuple[TenantId, NamespaceId, ChainHash]:
    """The inverse of `store_key`."""
    if len(key) != STORE_KEY_BYTES:
        raise InvalidInputError(f"store key of {len(key)} bytes: needs {STORE_KEY_BYTES}")
    return TenantId(key[:16]), NamespaceId(key[16:32]), ChainHash(key[32:])


class PrefixHasher:
    """Hashes token blocks for one tenant secret, salt and block size.

    Immutable after construction, so any thread may use it. Costs about 0.7 us per block of 16
    tokens, plus the conversion of the tokens to one buffer when they do not come as int32.
    """

    def __init__(self, secret: bytes, salt: str, tokens_per_block: int) -> None:
        """
        :param secret: the tenant's secret, at least 16 bytes; stays in the engine.
        :param salt: public text that separates caches under one secret; may be empty.
        :param tokens_per_block: tokens in a full block, from 1.
        """
        if len(secret) < 16:
            raise InvalidInputError(f"tenant secret of {len(secret)} bytes: use at least 16 random bytes")
        if not 1 <= tokens_per_block <= MAX_TOKENS_PER_BLOCK:
            raise InvalidInputError(f"tokens_per_block {tokens_per_block}: must be from 1 to {MAX_TOKENS_PER_BLOCK}")
        salt_bytes = salt.encode()
        message = b"".join(
            (_ROOT_LABEL, tokens_per_block.to_bytes(4, "little"), len(salt_bytes).to_bytes(4, "little"), salt_bytes)
        )
        self.tokens_per_block = tokens_per_block
        self._root = hmac.digest(secret, message, "sha256")
        self._seeded = hashlib.sha256(self._root)

    def hash_blocks(
        self,
        tokens: npt.ArrayLike,
        *,
        parent: ChainHash = CHAIN_START,
        extras: Mapping[int, Iterable[Extra]] | None = None,
    ) -> list[ChainHash]:
        """Chain hashes of all full blocks of `tokens`, in order; a partial last block has none.

        :param tokens: token ids, one dimension, 0 to 2**32 - 1. A contiguous int32 or uint32 array is
            hashed in place, anything else is converted first.
        :param parent: hash of the block before `tokens[0]`; `CHAIN_START` at the start of a sequence.
        :param extras: per block index, counted from `tokens[0]`, what else the block depends on.
        """
        view = token_bytes(tokens)
        block_bytes = 4 * self.tokens_per_block
        copy = self._seeded.copy
        hashes: list[ChainHash] = []
        previous: bytes = parent
        encoded = {i: encode_extras(e, self.tokens_per_block) for i, e in extras.items()} if extras else None
        extra = _NO_EXTRAS
        for start in range(0, len(view) - block_bytes + 1, block_bytes):
            if encoded is not None:
                extra = encoded.get(start // block_bytes, _NO_EXTRAS)
            state = copy()
            state.update(previous + view[start : start + block_bytes] + extra)
            previous = state.digest()
            hashes.append(ChainHash(previous))
        return hashes

    def external_key(self, digest: bytes) -> ChainHash:
        """The chain hash that stands for an engine-supplied `digest`. Never equals one of `hash_blocks`."""
        return ChainHash(hmac.digest(self._root, _EXTERNAL_LABEL + digest, "sha256"))


class BlockHasher:
    """Block keys of one tenant. Any thread."""

    def __init__(
        self,
        tenant: TenantId,
        hasher: PrefixHasher,
        previous: "Sequence[PreviousHasher]" = (),
        *,
        adapter: bytes | None = None,
    ) -> None:
        """
        :param hasher: with this tenant's secret and salt.
        :param previous: the hashers of secrets that this tenant had before, the newest first.
        :param adapter: digest of the LoRA adapter that all blocks are computed with; None: of none.
        """
        self.tenant, self._hasher, self.previous = tenant, hasher, tuple(previous)
        self._at_start = [] if adapter is None else [Extra(_ADAPTER, adapter, 0)]
        self.tokens_per_block = hasher.tokens_per_block

    def hash_blocks(
        self,
        tokens: npt.ArrayLike,
        *,
        parent: BlockKey | None = None,
        extras: Mapping[int, Iterable[Extra]] | None = None,
    ) -> list[BlockKey]:
        """Returns the tenant's keys of what `PrefixHasher.hash_blocks` hashes. `parent`: None at the start of a
        sequence."""
        if self._at_start and parent is None:  # from there it is in the hashes of all later blocks, too
            extras = {**(extras or {}), 0: [*(extras or {}).get(0, ()), *self._at_start]}
        before = CHAIN_START if parent is None else split_block_key(parent)[1]
        hashes = self._hasher.hash_blocks(tokens, parent=before, extras=extras)
        return [BlockKey(self.tenant + chain_hash) for chain_hash in hashes]

    def with_adapter(self, digest: bytes) -> "BlockHasher":
        """Returns the hasher of the same tenant's blocks that are computed with a LoRA adapter."""
        previous = [
            PreviousHasher(each.hasher.with_adapter(digest), each.retire_at_s, each.clock) for each in self.previous
        ]
        return BlockHasher(self.tenant, self._hasher, previous, adapter=digest)

    def external_key(self, digest: bytes) -> ChainHash:
        """Returns the chain hash that stands for an engine-supplied `digest`. Never equals one of `hash_blocks`."""
        return self._hasher.external_key(digest)


@dataclass(frozen=True, slots=True)
class PreviousHasher:
    """Block keys of one tenant under a secret that was replaced. Any thread."""

    hasher: BlockHasher
    """A hasher of the same tenant, salt and block size, without previous ones."""
    retire_at_s: float
    """The time at which the secret retires, in seconds since 1970."""
    clock: Clock = WALL

    @property
    def is_retired(self) -> bool:
        """Whether the secret is used no longer: from `retire_at_s` on."""
        return self.clock() >= self.retire_at_s


def encode_extras(extras: Iterable[Extra], tokens_per_block: int) -> bytes:
    """`extra_i` of the chain: length-prefixed canonical msgpack, sorted by offset, then kind."""
    ordered = sorted(extras, key=lambda e: (e.offset, e.kind, e.data))
    if not ordered:
        return _NO_EXTRAS
    for extra in ordered:
        if not 0 <= extra.offset < tokens_per_block:
            raise InvalidInputError(f"extra {extra.kind!r} at offset {extra.offset}: a block has {tokens_per_block}")
    packed: bytes = msgpack.packb([[e.kind, e.data, e.offset] for e in ordered], use_bin_type=True)
    return len(packed).to_bytes(4, "little") + packed


def token_bytes(tokens: npt.ArrayLike) -> bytes:
    """`tokens` as uint32 little endian bytes. Raises `InvalidInputError` on ids out of range."""
    array: npt.NDArray[Any] = np.asarray(tokens)
    if array.size == 0:
        return b""
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidInputError(f"tokens of shape {array.shape} and dtype {array.dtype}: need one integer dimension")
    lowest, highest = int(array.min()), int(array.max())
    if lowest < 0 or highest > _UINT32_MAX:
        raise InvalidInputError(f"token ids from {lowest} to {highest}: must lie in 0 .. {_UINT32_MAX}")
    return array.astype("<u4", copy=False).tobytes()
