"""The policies by the names that configuration and command line have for them."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from kvtier.errors import ConfigError
from kvtier.policies.arc import ARC
from kvtier.policies.base import EvictionPolicy
from kvtier.policies.by_sort_key import SORT_KEYS, BySortKey
from kvtier.policies.lru import LRU
from kvtier.policies.s3fifo import S3FIFO

POLICIES: Mapping[str, Callable[[], EvictionPolicy[Any]]] = {
    "default": LRU,
    "lru": LRU,
    **{name: partial(BySortKey, sort_key) for name, sort_key in SORT_KEYS.items()},
    "s3fifo": S3FIFO,
    "arc": ARC,
}
"""What makes each of them, empty. `default` is what is used where nothing is configured."""


def by_name(name: str) -> EvictionPolicy[Any]:
    """A new policy without any key. Raises `ConfigError` for a name that is none."""
    make = POLICIES.get(name)
    if make is None:
        raise ConfigError(f"there is no eviction policy {name!r}: name one of {', '.join(POLICIES)}")
    return make()
