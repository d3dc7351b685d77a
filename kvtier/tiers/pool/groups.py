"""How a batch of blocks looks in the block protocol: grouped by namespace and payload length, cut to a budget."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, repeat
from operator import itemgetter
from typing import NamedTuple

from kvtier.errors import InvalidInputError
from kvtier.keys import NAMESPACE_ID_BYTES, TENANT_ID_BYTES, StoreKey

_namespace_of = itemgetter(slice(TENANT_ID_BYTES, TENANT_ID_BYTES + NAMESPACE_ID_BYTES))
_hash_of = itemgetter(slice(TENANT_ID_BYTES + NAMESPACE_ID_BYTES, None))


class Grouped(NamedTuple):
    """A batch as it is sent."""

    fields: list[dict[str, object]]
    """The request's `groups`."""
    order: Sequence[int]
    """Places in the batch in the order in which the pool answers."""


def group(keys: Sequence[StoreKey], sizes: Sequence[int] | None = None) -> Grouped:
    """:param sizes: payload bytes of each block, for verbs that ask for them. About 0.1 us per key of one group."""
    namespaces, lengths = set(map(_namespace_of, keys)), set(sizes) if sizes is not None else {0}
    if len(namespaces) == len(lengths) == 1:
        return Grouped([_fields((namespaces.pop(), lengths.pop()), keys, sizes is not None)], range(len(keys)))
    places: dict[tuple[bytes, int], list[int]] = {}
    for i, (key, size) in enumerate(zip(keys, sizes or repeat(0), strict=False)):
        places.setdefault((_namespace_of(key), size), []).append(i)
    fields = [_fields(kind, [keys[i] for i in of_kind], sizes is not None) for kind, of_kind in places.items()]
    return Grouped(fields, [i for of_kind in places.values() for i in of_kind])


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


def _fields(kind: tuple[bytes, int], keys: Iterable[StoreKey], with_size: bool) -> dict[str, object]:
    namespace, size = kind
    fields: dict[str, object] = {"namespace": namespace, "hashes": b"".join(map(_hash_of, keys))}
    if with_size:
        fields["payload_bytes"] = size
    return fields
