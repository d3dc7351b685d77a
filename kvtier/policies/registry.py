"""The policies by the names that configuration and command line have for them."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from kvtier.errors import ConfigError
from kvtier.policies.arc import ARC
from kvtier.policies.base import EvictionPolicy
from kvtier.policies.by_sort_key import SORT_KEYS, BySortKey
from kvtier.policies.learned import Learned
from kvtier.policies.lru import LRU
from kvtier.policies.s3fifo import S3FIFO

POLICIES: Mapping[str, Callable[[], EvictionPolicy[Any]]] = {
    "default": Learned,
    "lru": LRU,
    **{name: partial(BySortKey, sort_key) for name, sort_key in SORT_KEYS.items()},
    "s3fifo": S3FIFO,
    "arc": ARC,
}
"""What makes each of them, empty. `default` is what the simulator uses where none is named."""


def by_name(name: str, *, num_blocks: int | None = None) -> EvictionPolicy[Any]:
    """A new policy without any key. Raises `ConfigError` for a name that is none.

    :param num_blocks: the capacity, for a policy that heeds it, where the owner knows it.
    """
    make = POLICIES.get(name)
    if make is None:
        raise ConfigError(f"there is no eviction policy {name!r}: name one of {', '.join(POLICIES)}")
    return Learned(num_blocks) if make is Learned else make()
