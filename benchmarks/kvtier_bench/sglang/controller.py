"""SGLang's HiCache controller with a host pool and a storage: prompts written and read through its own threads."""

import threading
import time
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Empty
from typing import Any

import torch
from sglang.srt.managers.cache_controller import HiCacheController, PrefetchOperation
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.utils import get_hash_str
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from kvtier.errors import KvtierError

PAGE_TOKENS = 64
_LAYERS, _HEADS, _HEAD_DIM = 16, 4, 128
PAGE_BYTES = 2 * _LAYERS * _HEADS * _HEAD_DIM * PAGE_TOKENS * torch.bfloat16.itemsize
"""Keys and values of all layers: 2 MiB."""
_WAIT_S = 60.0
_BUDGET_BYTES = 16 << 30


@dataclass
class Controller:
    """A prompt of `num_pages` in the first half of a host pool, and room to read it into in the second."""

    name: str
    num_pages: int
    controller: Any
    """SGLang's cache controller; its threads write and read."""
    host_pool: Any

    def __post_init__(self) -> None:
        self._tokens = array("q", range(1, 1 + self.num_pages * PAGE_TOKENS))
        self._names: list[str] = get_hash_str(self._tokens, page_size=PAGE_TOKENS)
        slots = self.host_pool.alloc(2 * self.num_pages * PAGE_TOKENS)
        self._source, self._target = slots[: len(self._tokens)], slots[len(self._tokens) :]
        generator = torch.Generator().manual_seed(0)
        for page in self._source.view(-1, PAGE_TOKENS):
            made_up = torch.randint(-(2**15), 2**15, (PAGE_BYTES // 2,), dtype=torch.int16, generator=generator)
            self.host_pool.set_from_flat_data_page(int(page[0]), made_up.view(torch.bfloat16))
        self._is_compared = True
        self.poison()

    @property
    def nbytes(self) -> int:
        """The bytes of the prompt's pages."""
        return self.num_pages * PAGE_BYTES

    def forget(self) -> None:
        """The storage has nothing."""
        self.controller.storage_backend.clear()
        if self._num_stored():
            raise KvtierError(f"{self.name} still has pages that were cleared: a write would not be one")

    def poison(self) -> None:
        """Puts something else where the next read goes to; after `require_equal` of the last one."""
        self.require_equal()
        for page in self._target.view(-1, PAGE_TOKENS):
            self.host_pool.set_from_flat_data_page(int(page[0]), torch.zeros(PAGE_BYTES // 2, dtype=torch.bfloat16))

    def write(self) -> list[float]:
        """Writes the prompt's pages to the storage. Raises `KvtierError` unless all of them are there at the end."""
        start = time.perf_counter()
        self.controller.write_storage(self._source, self._tokens, hash_value=self._names)
        done = self.controller.ack_backup_queue.get(timeout=_WAIT_S)
        seconds = time.perf_counter() - start
        if done.completed_tokens != len(self._tokens) or self._num_stored() != self.num_pages:
            raise KvtierError(f"{self.name} did not write all pages: the figures would mean nothing")
        return [seconds]

    def read(self) -> list[float]:
        """Looks the prompt up and reads it into the host pool. `require_equal` has to follow."""
        controller = self.controller
        operation = PrefetchOperation("bench", self._tokens)
        start = time.perf_counter()
        controller.prefetch_queue.put(operation)
        controller.prefetch_hit_queue.get(timeout=_WAIT_S)
        operation.host_indices = self._target
        controller.prefetch_buffer.put(operation)
        num_read, seconds = self._await_read(start)
        if num_read != len(self._tokens):
            raise KvtierError(f"{self.name} did not read all pages: the figures would mean nothing")
        self._is_compared = False
        return [seconds]

    def require_equal(self) -> None:
        """Raises `KvtierError` unless the last read, if it was not compared yet, has brought what was written."""
        if not self._is_compared and not self._is_equal():
            raise KvtierError(f"{self.name} read something else than was written: the figures would mean nothing")
        self._is_compared = True

    def _await_read(self, start: float) -> tuple[int, float]:
        """Tokens that were read, and the seconds since `start`."""
        num_read = 0
        while True:
            try:
                ack = self.controller.ack_prefetch_queue.get(timeout=_WAIT_S)
            except Empty:
                raise KvtierError(f"{self.name} did not answer within {_WAIT_S:.0f} s") from None
            if ack.completed_tokens is not None:
                num_read = ack.completed_tokens
            if ack.completed_req:
                return num_read, time.perf_counter() - start

    def _num_stored(self) -> int:
        return int(self.controller.storage_backend.batch_exists(self._names))

    def _is_equal(self) -> bool:
        pairs = zip(self._source.view(-1, PAGE_TOKENS), self._target.view(-1, PAGE_TOKENS), strict=True)
        page = self.host_pool.get_data_page
        return all(torch.equal(page(int(a[0])).view(torch.int16), page(int(b[0])).view(torch.int16)) for a, b in pairs)


@contextmanager
def controller(
    name: str, backend: str, extra: Mapping[str, Any], *, layout: str, num_pages: int
) -> Iterator[Controller]:
    """
    :param name: for reports.
    :param backend: `--hicache-storage-backend`.
    :param extra: its extra config.
    :param layout: SGLang's, of the host pool.
    """
    device = MHATokenToKVPool(
        size=PAGE_TOKENS,
        page_size=PAGE_TOKENS,
        dtype=torch.bfloat16,
        head_num=_HEADS,
        head_dim=_HEAD_DIM,
        layer_num=_LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", page_size=PAGE_TOKENS))
    with host_memory_budget_scope(_BUDGET_BYTES):
        host = MHATokenToKVPoolHost(
            device.get_device_pool_infos()[0].buffer_info,
            1.0,
            0,
            PAGE_TOKENS,
            layout,
            pin_memory=False,
            device_capacity_tokens=device.size,
            start_layer=device.start_layer,
            end_layer=device.end_layer,
            host_token_capacity=2 * num_pages * PAGE_TOKENS,
        )
    allocator = TokenToKVPoolAllocator(
        size=PAGE_TOKENS, dtype=torch.bfloat16, device="cpu", kvcache=device, need_sort=False
    )
    with get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1):
        hicache = HiCacheController(
            allocator,
            host,
            PAGE_TOKENS,
            None,
            threading.Event(),
            io_backend="kernel",
            storage_backend=backend,
            model_name="bench",
            storage_backend_extra_config=dict(extra),
        )
        try:
            yield Controller(name, num_pages, hicache, host)
        finally:
            hicache.detach_storage_backend()
