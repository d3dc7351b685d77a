"""Pages of one host pool as the cache pool has them, and the keys of their parts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier.identity.keys import BlockKey, NamespaceId, StoreKey, rank_keys


@dataclass(frozen=True, slots=True)
class PageKind:
    """Pages of one host pool, as the pool has them."""

    name: str
    """The host pool's, in SGLang and in metrics."""
    namespaces: tuple[NamespaceId, ...]
    """The namespaces of the parts of a page, in order."""
    part_bytes: tuple[int, ...]
    batch_pages: int
    """Pages in one transfer."""


Wanted = Sequence[tuple[PageKind, Sequence[str]]]
"""Pages of several kinds, by SGLang's names."""
KeysOf = Callable[[Sequence[str]], Sequence[BlockKey]]
"""The keys of pages, in order."""


def part_keys(kind: PageKind, keys: Sequence[BlockKey]) -> list[StoreKey]:
    """Returns the keys of all first parts, then of all second ones: what is sent together has one size and
    namespace."""
    return [key for namespace in kind.namespaces for key in rank_keys(keys, namespace)]
