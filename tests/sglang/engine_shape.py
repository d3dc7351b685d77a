"""What engines are in these tests: their shapes, the tokens that they are asked, and the storages that they have."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import not_reached  # noqa: F401  (before SGLang)
import torch
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.test.kits.unified_radix_cache.config import CacheConfig

from cache_pool import TOKENS, CachePool
from kvtier_sglang import settings

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
PAGE_SIZES = (1, 4, 16, 64)
ENVIRON = {
    "KV_SECRET": "a secret of more than sixteen bytes",
    **{f"{name.upper()}_TOKEN": token for name, token in TOKENS.items()},
}
PATIENT_POOL = {"connect_timeout_s": 30.0, "call_timeout_s": 30.0}
PATIENT_CACHE = {"lookup_deadline_s": 30.0}
"""Deadlines that no machine is too slow for: what misses them is a miss, and no test would see why."""


@contextlib.contextmanager
def deadlines_of_any_length() -> Iterator[None]:
    """While it lasts, storages are made also with deadlines that SGLang would not wait for at its end."""
    with mock.patch.object(settings, "_MOST_S", float("inf")):
        yield


@dataclass(frozen=True, slots=True)
class Storage:
    """What a user names as the storage behind HiCache."""

    backend: str
    """`--hicache-storage-backend`."""
    extra: Mapping[str, Any]
    """`--hicache-storage-backend-extra-config`."""


def kvtier(pool: CachePool, /, tenant: str = "red", *, copying: bool = False, **tables: Any) -> Storage:
    """Ours, over a pool. All tenants share a secret: only their names part them.

    :param copying: without SGLang's interface that hands over addresses.
    :param tables: of the configuration; `pool` and `cache` have deadlines of their own.
    """
    interface = {} if copying else {"interface_v1": 1}
    named = {"backend_name": "kvtier", "module_path": "kvtier_sglang", "class_name": "KvtierStorage", **interface}
    tenants = {tenant: {"secret": "env:KV_SECRET", "token": f"env:{tenant.upper()}_TOKEN"}}
    ours = {"tenant": tenant, "tenants": tenants, "model_revision": "tiny"}
    patient = {"pool": {"address": [pool.address], **PATIENT_POOL}, "cache": PATIENT_CACHE}
    return Storage("dynamic", {**named, **ours, **patient, **tables})


@dataclass(frozen=True, slots=True)
class Shape:
    """All settings of an engine that decide what bytes its pages hold."""

    page_size: int = 16
    """In tokens."""
    layout: str = "page_first"
    kind: str = "full"
    """`full`: attention of all layers is full; `latent`: the same over a latent vector, that is all heads'; `swa`: most
    slide over a window; `mamba`: most are state spaces."""
    num_layers: int = 4
    num_pages: int = 16
    """That fit on the device."""
    dtype: str = "bfloat16"
    rank: int = 0
    num_ranks: int = 1

    def __str__(self) -> str:
        return f"{self.kind}-{self.layout}-{self.page_size}-{self.num_layers}"

    def tensor_parallel(self) -> dict[str, int]:
        """SGLang's names of it: attention and experts are divided among the same ranks."""
        parts = ("", "attn_", "moe_")
        ranks = {f"{part}tp_rank": self.rank for part in parts}
        return ranks | {f"{part}tp_size": self.num_ranks for part in parts}

    @property
    def window_pages(self) -> int:
        """Pages of a sliding window; 0 without one."""
        return -(-self.config().sliding_window_size // self.page_size) if self.kind == "swa" else 0

    def config(self) -> CacheConfig:
        """For SGLang's kit."""
        num_tokens = self.num_pages * max(16, self.page_size)
        room = {"kv_size": num_tokens, "max_context_len": num_tokens, "max_num_reqs": 64}
        attention = {"num_layers": self.num_layers, "full_attention_layer_ids": tuple(range(1, self.num_layers, 2))}
        components: tuple[ComponentType, ...] = (ComponentType.FULL,)
        more: dict[str, Any] = {}
        if self.kind == "swa":
            components, more = (*components, ComponentType.SWA), {"sliding_window_size": max(4, self.page_size)}
        elif self.kind == "mamba":
            components = (*components, ComponentType.MAMBA)
            more = {"enable_mamba_extra_buffer": self.page_size > 1, "mamba_cache_size": 200}
        return CacheConfig(
            page_size=self.page_size,
            components=components,
            dtype=getattr(torch, self.dtype),
            **room,
            **attention,
            **more,
        )


def pages(shape: Shape, start: int, num_pages: int) -> list[int]:
    """Tokens that fill so many pages; those of another start share none."""
    return list(range(1 + 1000 * start, 1 + 1000 * start + num_pages * shape.page_size))
