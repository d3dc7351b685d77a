"""`KvtierStorage` over SGLang's own host pools, called as its controller calls it, without trees and threads."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import not_reached  # noqa: F401  (before SGLang)
import torch
from engine_shape import PATIENT_CACHE, PATIENT_POOL, deadlines_of_any_length
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.utils import get_hash_str

from cache_pool import TOKENS, CachePool
from kvtier_sglang import KvtierStorage

PAGE = 16
"""Tokens of a page."""
NUM_PAGES = 32
"""Pages of a host pool."""
_LAYERS = 6
_HOST_BYTES = 1 << 30
ALONE = HiCacheStorageConfig(
    tp_rank=0,
    tp_size=1,
    pp_rank=0,
    pp_size=1,
    attn_cp_rank=0,
    attn_cp_size=1,
    is_mla_model=False,
    enable_storage_metrics=True,
    is_page_first_layout=True,
    model_name="tiny",
)


def extra(tenant: str = "red", **more: Any) -> dict[str, Any]:
    """The extra config of an engine, but for its pool."""
    tenants = {tenant: {"secret": "env:KV_SECRET", "token": f"env:{tenant.upper()}_TOKEN"}}
    ours = {"tenant": tenant, "tenants": tenants, "model_revision": "1"}
    named = {"backend_name": "kvtier", "module_path": "kvtier_sglang", "class_name": "KvtierStorage"}
    return {**named, "interface_v1": 1, **ours, **more}


def host_pool(layout: str = "page_first", *, seed: int | None = None, latent: bool = False, heads: int = 2) -> Any:
    """One of SGLang's, with random bytes in it, or with zeros."""
    size, dtype = NUM_PAGES * PAGE, torch.bfloat16
    device = {"page_size": PAGE, "dtype": dtype, "layer_num": _LAYERS, "device": "cpu", "enable_memory_saver": False}
    host = {"host_to_device_ratio": 1.0, "host_size": 0, "page_size": PAGE, "layout": layout, "pin_memory": False}
    host |= {"device_capacity_tokens": size, "start_layer": 0, "end_layer": _LAYERS}
    with host_memory_budget_scope(_HOST_BYTES):
        if latent:
            rows = MLATokenToKVPool(size, kv_lora_rank=64, qk_rope_head_dim=16, **device)
            pool: Any = MLATokenToKVPoolHost(rows._mla_buffer_info(), target_layer_num=_LAYERS, **host)
        else:
            kv = MHATokenToKVPool(size, head_num=heads, head_dim=32, **device)
            pool = MHATokenToKVPoolHost(kv._mha_buffer_info(), **host)
    memory = content(pool)
    memory.zero_() if seed is None else memory.random_(generator=torch.Generator().manual_seed(seed))
    return pool


def content(pool: Any) -> torch.Tensor:
    """All bytes of a host pool."""
    flat: torch.Tensor = pool.kv_buffer.view(torch.uint8).view(-1)
    return flat


def page_bytes(pool: Any, page: int) -> bytes:
    """The bytes of one page, copied in SGLang's own way."""
    return bytes(pool.get_data_page(page * PAGE).contiguous().view(torch.uint8).flatten().numpy())


def indices(*pages: int) -> torch.Tensor:
    """As SGLang names these pages of a host pool."""
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def digests(num_pages: int, start: int = 1) -> list[str]:
    """What SGLang calls the pages of a prompt."""
    tokens = list(range(start * 100_000, start * 100_000 + num_pages * PAGE))
    hashes: list[str] = get_hash_str(tokens, page_size=PAGE)
    return hashes


def transfer(
    name: PoolName, keys: Sequence[str], *pages: int, policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES
) -> PoolTransfer:
    """Pages of a side pool."""
    return PoolTransfer(name=name, keys=list(keys), host_indices=indices(*pages) if pages else None, hit_policy=policy)


@contextlib.contextmanager
def storage(
    pool: CachePool | str,
    /,
    *registered: Any,
    config: HiCacheStorageConfig = ALONE,
    client: Mapping[str, Any] | None = None,
    **more: Any,
) -> Iterator[KvtierStorage]:
    """One with the first of these host pools for KV, the others by name; closed at the end.

    :param client: of the table `pool`. Deadlines that it and `cache` do not set are long ones.
    """
    table = {"address": [pool if isinstance(pool, str) else pool.address], **PATIENT_POOL, **(client or {})}
    cache = {**PATIENT_CACHE, **more.pop("cache", {})}
    with deadlines_of_any_length():
        made = KvtierStorage(replace(config, extra_config=extra(pool=table, cache=cache, **more)), {})
    try:
        for place, each in enumerate(registered):
            if place == 0:
                made.register_mem_pool_host(each)
                made.register_mem_host_pool_v2(each, PoolName.KV)
            else:
                made.register_mem_host_pool_v2(each[1], each[0])
        made.on_host_pools_registered()
        yield made
    finally:
        made.close()


def count(made: KvtierStorage, op: str, status: str, pool: str = "kv") -> int:
    """Pages, by our own metrics."""
    labels = {"pool": pool, "op": op, "status": status}
    return int(made.metrics.get_sample_value("kvtier_sglang_pages_total", labels) or 0)


__all__ = ["ALONE", "PAGE", "TOKENS", "CachePool", "PoolHitPolicy", "PoolName", "storage", "transfer"]
