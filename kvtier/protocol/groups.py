"""How a batch of blocks looks in the block protocol: grouped by namespace and payload length, cut to a budget."""

from collections.abc import Iterator, Sequence
from itertools import groupby, repeat
from operator import itemgetter
from typing import NamedTuple, TypeVar

import numpy as np

from kvtier.errors import InvalidInputError
from kvtier.identity.keys import (
    NAMESPACE_ID_BYTES,
    NUMPY_PAYS_FROM,
    STORE_KEY_BYTES,
    TENANT_ID_BYTES,
    BlockKey,
    NamespaceId,
    StoreKey,
)

_namespace_of = itemgetter(slice(TENANT_ID_BYTES, TENANT_ID_BYTES + NAMESPACE_ID_BYTES))
_HASH_WORD = (TENANT_ID_BYTES + NAMESPACE_ID_BYTES) // 8
"""The place at which the chain hash begins in a store key, in words of 8 bytes."""
_hash_of = itemgetter(slice(TENANT_ID_BYTES + NAMESPACE_ID_BYTES, None))
_chain_of = itemgetter(slice(TENANT_ID_BYTES, None))
"""The chain hash of a block key."""
_T = TypeVar("_T")


class Grouped(NamedTuple):
    """A batch as it is sent."""

    fields: list[dict[str, object]]
    """The request's `groups`."""
    order: Sequence[int]
    """Places in the batch in the order in which the pool answers."""

    def in_batch_order(self, answered: list[_T]) -> list[_T]:
        """What the pool answers, one item per block, as the batch has its blocks.

        Raises `InvalidInputError` for an answer about another number of blocks.
        """
        require_count(len(answered), len(self.order))
        if isinstance(self.order, range):
            return answered
        return [item for _, item in sorted(zip(self.order, answered, strict=True), key=itemgetter(0))]


def group(keys: Sequence[StoreKey], sizes: Sequence[int] | None = None) -> Grouped:
    """:param sizes: payload bytes of each block, for verbs that ask for them. About 0.05 us per key of one group."""
    lengths = set(sizes) if sizes is not None else {0}
    whole = _of_one_namespace(keys) if len(lengths) == 1 else None
    if whole is not None:
        return Grouped([_fields(*whole, lengths.pop() if sizes is not None else None)], range(len(keys)))
    places: dict[tuple[bytes, int], list[int]] = {}
    for i, (key, size) in enumerate(zip(keys, sizes or repeat(0), strict=False)):
        places.setdefault((_namespace_of(key), size), []).append(i)
    fields = [
        _fields(namespace, b"".join(_hash_of(keys[i]) for i in of_kind), size if sizes is not None else None)
        for (namespace, size), of_kind in places.items()
    ]
    return Grouped(fields, [i for of_kind in places.values() for i in of_kind])


def group_of_rank(keys: Sequence[BlockKey], namespace: NamespaceId) -> Grouped:
    """What `group(rank_keys(keys, namespace))` gives for one key at least, and makes no store keys for it."""
    return Grouped([_fields(namespace, b"".join(map(_chain_of, keys)), None)], range(len(keys)))


def require_count(found: int, expected: int) -> None:
    """Raises `InvalidInputError` for an answer about another number of blocks than were asked for."""
    if found != expected:
        raise InvalidInputError(f"garbled answer of the pool: {found} items, {expected} expected")


def windows(sizes: Sequence[int], max_bytes: int, max_blocks: int) -> Iterator[tuple[int, int]]:
    """Ranges of blocks of one size, each within both bounds or a single block."""
    start = 0
    for size, run in groupby(sizes):
        end = start + sum(1 for _ in run)
        step = max(1, min(max_blocks, max_bytes // max(1, size)))
        for at in range(start, end, step):
            yield at, min(at + step, end)
        start = end


def _of_one_namespace(keys: Sequence[StoreKey]) -> tuple[bytes, bytes] | None:
    """Namespace and joined hashes; None where namespaces differ."""
    if len(keys) < NUMPY_PAYS_FROM:
        namespaces = set(map(_namespace_of, keys))
        return (namespaces.pop(), b"".join(map(_hash_of, keys))) if len(namespaces) == 1 else None
    words = np.frombuffer(b"".join(keys), dtype="<u8").reshape(len(keys), STORE_KEY_BYTES // 8)
    is_one = (words[:, :_HASH_WORD] == words[0, :_HASH_WORD]).all()
    return (_namespace_of(keys[0]), words[:, _HASH_WORD:].tobytes()) if is_one else None


def _fields(namespace: bytes, hashes: bytes, payload_bytes: int | None) -> dict[str, object]:
    fields: dict[str, object] = {"namespace": namespace, "hashes": hashes}
    if payload_bytes is not None:
        fields["payload_bytes"] = payload_bytes
    return fields
