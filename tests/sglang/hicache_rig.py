"""SGLang's radix trees with HiCache over a storage: device pools on the CPU, its host pools, controller and threads.

Built by the test kit that SGLang ships, whose waits are bounded by 10 s.
"""

import contextlib
import json
import unittest
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import not_reached  # noqa: F401  (before SGLang)
import torch
from cpu_copies import on_the_cpu
from engine_shape import Shape, Storage, deadlines_of_any_length
from sglang.kernels.ops.attention.fla.chunk_delta_h import CHUNK_SIZE
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, MatchPrefixParams
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.test.kits.unified_radix_cache import fixtures
from sglang.test.kits.unified_radix_cache.fixtures import drop_hicache_atexit_pin, node_device_value
from sglang.test.kits.unified_radix_cache.storage import UnifiedRadixCacheStorageFixtures

_NEVER = 1 << 30
_ODD = 0x2545F4914F6CDD1D
WAIT_S = 10.0
"""Bound on what a scheduler waits for."""
_HOST_BYTES = 4 << 30
"""What host pools may take of this machine's memory, however much is free."""


class Kit(UnifiedRadixCacheStorageFixtures, unittest.TestCase):
    """SGLang's kit, but for where its trees are stored: a `Storage` in place of a folder."""

    __test__ = False

    def __init__(self, shape: Shape, stack: ExitStack) -> None:
        """:param stack: its end is that of all trees."""
        super().__init__()
        self.shape, self.cfg, self._stack = shape, shape.config(), stack

    def addCleanup(self, function: Callable[..., object], /, *arguments: Any, **named: Any) -> None:
        self._stack.callback(function, *arguments, **named)

    def _init_hicache(
        self,
        cache: Any,
        *,
        storage_dir: Storage,
        storage_backend: str = "",
        write_policy: str = "write_through",
        prefetch_threshold: int = 1,
        prefetch_policy: str = "wait_complete",
        host_memory_mode: str = "cache",
        storage_extra: Mapping[str, Any] | None = None,
        context_length: int | None = None,
    ) -> None:
        shape, storage = self.shape, storage_dir
        extra = {"prefetch_threshold": prefetch_threshold, **storage.extra, **(storage_extra or {})}
        arguments = ServerArgs(
            model_path="dummy",
            page_size=shape.page_size,
            hicache_io_backend="direct" if shape.layout == "page_first_direct" else "kernel",
            hicache_mem_layout=shape.layout,
            hicache_write_policy=write_policy,
            hicache_storage_backend=storage.backend,
            hicache_storage_backend_extra_config=json.dumps(extra),
            hicache_storage_prefetch_policy=prefetch_policy,
            hicache_host_memory_mode=host_memory_mode,
            context_length=context_length,
        )
        arguments._mamba_cache_chunk_size = max(CHUNK_SIZE, shape.page_size)
        set_global_server_args_for_scheduler(arguments)
        self._stack.enter_context(get_parallel().override(pp_rank=0, pp_size=1, **shape.tensor_parallel()))
        with host_memory_budget_scope(_HOST_BYTES), deadlines_of_any_length():
            cache.init_hicache(arguments, cache.cache_init_params)
        drop_hicache_atexit_pin(cache)
        controller = cache.cache_controller
        self._stack.callback(cache.release_host_resources)
        self._stack.callback(controller.detach_storage_backend)
        cache.write_through_threshold, cache.load_back_threshold = _NEVER, 0
        # Device and host pool are of one size here, which leaves nothing for prefetches.
        controller.prefetch_capacity_limit = max(controller.prefetch_capacity_limit, controller.mem_pool_host.size)


@dataclass
class Engine:
    """A tree with its pools, in the place of an engine's scheduler. One thread."""

    kit: Kit
    storage: Storage
    cache: Any = field(init=False)
    allocator: Any = field(init=False)
    requests: Any = field(init=False)
    _num_requests: int = 0

    def __post_init__(self) -> None:
        self.cache, self.allocator, self.requests = self.kit._l3_consumer(self.storage)

    @property
    def backend(self) -> Any:
        """What SGLang has made of the storage."""
        return self.cache.cache_controller.storage_backend

    def compute(self, tokens: Sequence[int], *, salt: str | None = None, seed: int = 0) -> None:
        """Puts KV on the device under `tokens`: random bytes, the same ones in every process."""
        self.kit._insert(self.cache, self.allocator, self.requests, list(tokens), cache_salt=salt)
        for name, (buffer, slots) in self._on_device(tokens, salt).items():
            buffer[slots] = made_up(name, seed, buffer, len(slots))

    def store(self, tokens: Sequence[int], *, salt: str | None = None) -> None:
        """From the device to the host and from there to the storage. Returns when SGLang calls it done."""
        self.begin_store(tokens, salt=salt)
        self.end_store()

    def begin_store(self, tokens: Sequence[int], *, salt: str | None = None) -> None:
        """SGLang's thread for writes has it to do."""
        node = self._match(tokens, salt).last_device_node
        self.kit._backup_node(self.cache, node)
        self.kit._write_path_to_l3(self.cache, node)

    def end_store(self) -> None:
        self.kit._flush_l3_backups(self.cache, timeout=WAIT_S)

    def num_stored(self, tokens: Sequence[int], *, salt: str | None = None) -> int:
        """Tokens of the longest prefix that the storage says it has."""
        names = get_storage_hash_str(RadixKey(array("q", tokens), cache_salt=salt), page_size=self.kit.shape.page_size)
        return int(self.backend.batch_exists(names)) * self.kit.shape.page_size

    def prefetch(self, tokens: Sequence[int], *, salt: str | None = None) -> int:
        """From the storage to the host. Gives the tokens that are there, of the longest prefix."""
        self.begin_prefetch(tokens, salt=salt)
        return self.end_prefetch(tokens, salt=salt)

    def begin_prefetch(self, tokens: Sequence[int], *, salt: str | None = None) -> None:
        """SGLang's threads for queries and reads have it to do."""
        self._num_requests += 1
        root = self.cache.root_node_handle()
        self.cache.prefetch_from_storage(self._request, root, array("q", tokens), None, None, cache_salt=salt)

    def end_prefetch(self, tokens: Sequence[int], *, salt: str | None = None) -> int:
        self.kit._run_prefetch_to_completion(self.cache, self._request, timeout=WAIT_S)
        match = self._match(tokens, salt)
        return int(match.device_prefix_len + match.host_hit_length)

    @property
    def _request(self) -> CacheRequestHandle:
        """The latest."""
        return CacheRequestHandle(f"request-{self._num_requests}", 0)

    def load(self, tokens: Sequence[int], *, salt: str | None = None) -> None:
        """From the host to the device, all of what `prefetch` has said."""
        node = self._match(tokens, salt).best_match_node
        self.kit._load_back_node(self.cache, node, self.kit._make_req(self.requests))

    def require_equal(self, tokens: Sequence[int], *, salt: str | None = None, seed: int = 0) -> None:
        """Fails unless the device has, byte for byte, what `compute` puts there."""
        for name, (buffer, slots) in self._on_device(tokens, salt).items():
            expected = made_up(name, seed, buffer, len(slots))
            there = slots > 0
            # Nothing is kept of what is before a sliding window.
            num_needed = self.kit.shape.window_pages * self.kit.shape.page_size if name.startswith("swa") else 0
            assert there[-num_needed:].all(), f"{name}: {int((~there).sum())} of {len(there)} slots are not there"
            same = (bits(buffer[slots]) == bits(expected)).flatten(1).all(1)
            assert same[there].all(), f"{name}: {int((~same[there]).sum())} of {int(there.sum())} slots are wrong"

    def fetch(self, tokens: Sequence[int], *, salt: str | None = None, seed: int = 0) -> int:
        """`prefetch`, and what is there is loaded and compared. Gives the tokens of the hit."""
        num_hit = self.prefetch(tokens, salt=salt)
        self.require_loaded(tokens[:num_hit], salt=salt, seed=seed)
        return num_hit

    def require_loaded(self, tokens: Sequence[int], *, salt: str | None = None, seed: int = 0) -> None:
        """Loads what is on the host, and fails unless it is, byte for byte, what `compute` makes."""
        if tokens:
            self.load(tokens, salt=salt)
            self.require_equal(tokens, salt=salt, seed=seed)

    def require_alive(self) -> None:
        """None of SGLang's threads that move pages has died."""
        names = ("prefetch_thread", "prefetch_io_aux_thread", "prefetch_sync_thread", "backup_thread")
        dead = [name for name in names if not getattr(self.cache.cache_controller, name).is_alive()]
        assert not dead, f"threads have died: {dead}"

    def _match(self, tokens: Sequence[int], salt: str | None) -> Any:
        return self.cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens), cache_salt=salt)))

    def _on_device(self, tokens: Sequence[int], salt: str | None) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Buffers whose first dimension is slots, and the slots of these tokens."""
        node = self._match(tokens, salt).last_device_node
        slots = self.cache.path_device_indices(node)
        assert len(slots) == len(tokens), f"{len(slots)} of {len(tokens)} tokens are on the device"
        pool = self.allocator.get_kvcache()
        found = _layers("full", getattr(pool, "full_kv_pool", pool), slots)
        if self.kit.cfg.has_swa:
            found |= _layers("swa", pool.swa_kv_pool, self.allocator.full_to_swa_index_mapping[slots])
        if self.kit.cfg.has_mamba:
            states = self.requests.mamba_pool.mamba_cache
            at = node_device_value(self.cache, node, ComponentType.MAMBA)
            for name, buffers in (("temporal", states.temporal), *((f"conv{i}", c) for i, c in enumerate(states.conv))):
                found |= {f"{name} of layer {layer}": (buffer, at) for layer, buffer in enumerate(buffers)}
        return found


def _layers(name: str, pool: Any, slots: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    found = {}
    is_latent = isinstance(pool, MLATokenToKVPool)
    parts = {"latents": pool.kv_buffer} if is_latent else {"keys": pool.k_buffer, "values": pool.v_buffer}
    for part, buffers in parts.items():
        found |= {f"{name} {part} of layer {layer}": (buffer, slots) for layer, buffer in enumerate(buffers)}
    return found


def made_up(name: str, seed: int, buffer: torch.Tensor, num_slots: int) -> torch.Tensor:
    """Bytes of any value, NaNs and infinities among them, for that many slots of a buffer.

    The bytes of a slot depend on its number, not on how many there are.
    """
    slot_bytes = buffer[0].numel() * buffer.element_size()
    mixed = torch.arange(num_slots * slot_bytes) * _ODD + zlib.crc32(f"{name} {seed}".encode())
    mixed = (mixed ^ (mixed >> 29)) * _ODD
    return (mixed >> 40).to(torch.uint8).view(buffer.dtype).view(num_slots, *buffer.shape[1:])


def bits(values: torch.Tensor) -> torch.Tensor:
    """Comparable also where a value is not equal to itself."""
    return values.contiguous().view(torch.uint8)


@contextlib.contextmanager
def kits(shape: Shape) -> Iterator[Kit]:
    """SGLang's kit. At its end, the threads of all its trees have ended and their storages are closed."""
    with on_the_cpu(), ExitStack() as stack:
        if shape.kind == "latent":
            stack.enter_context(mock.patch.object(fixtures, "MHATokenToKVPool", _latent_pool))
        yield Kit(shape, stack)


def _latent_pool(*, head_num: int, head_dim: int, **more: Any) -> MLATokenToKVPool:
    """In the place of the kit's pool of keys and values, with rows of as many bytes as one head's."""
    return MLATokenToKVPool(kv_lora_rank=head_dim, qk_rope_head_dim=head_dim, **more)


@contextlib.contextmanager
def engine(shape: Shape, storage: Storage) -> Iterator[Engine]:
    """A running one."""
    with kits(shape) as kit:
        yield Engine(kit, storage)
