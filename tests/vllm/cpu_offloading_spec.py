"""vLLM's native tiers on a machine without a GPU: its own `TieringOffloadingSpec`, with another worker to copy blocks.

`"spec_name": "HostTieringSpec", "spec_module_path": "cpu_offloading_spec"` in `kv_connector_extra_config`. Manager,
primary tier and secondary tiers are vLLM's, and so is the shared memory that they are in.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class HostTieringSpec(TieringOffloadingSpec):
    """`TieringOffloadingSpec`, but for the worker."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self.config.canonical_layout:
            raise ValueError("canonical_layout: this worker copies whole pages only; leave it out")
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self.config.engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = HostCopyWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker


class HostCopyWorker(OffloadingWorker):
    """Copies pages between paged KV in host memory and the primary tier: at once, in the thread that asks."""

    def __init__(self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, region: SharedOffloadRegion) -> None:
        """:param region: owned from now on."""
        self._region, self._blocks_per_chunk = region, blocks_per_chunk
        self._groups = kv_caches.group_data_refs
        self._results: list[TransferResult] = []
        self._device: list[Tensor] = []
        """Per tensor `[blocks, page]`."""
        self._chunks: list[Tensor] = []
        """Per tensor `[chunks, blocks of a chunk, page]`."""
        for cache in kv_caches.tensors:
            page = cache.page_size_bytes
            self._device.append(cache.tensor.view(torch.int8).view(-1, page))
            cells = region.create_next_worker_view(page * blocks_per_chunk)
            self._chunks.append(cells.unflatten(1, (blocks_per_chunk, page)))

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        copied = 0
        for group, blocks, chunks, places in self._moves(src_spec, dst_spec):
            for ref in self._groups[group]:
                pages = self._device[ref.tensor_idx][blocks]
                self._chunks[ref.tensor_idx][chunks, places] = pages
                copied += pages.numel()
        return self._done(job_id, copied)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        copied = 0
        for group, blocks, chunks, places in self._moves(dst_spec, src_spec):
            for ref in self._groups[group]:
                pages = self._chunks[ref.tensor_idx][chunks, places]
                self._device[ref.tensor_idx][blocks] = pages
                copied += pages.numel()
        return self._done(job_id, copied)

    def get_finished(self) -> list[TransferResult]:
        results, self._results = self._results, []
        return results

    def wait(self, job_ids: set[int]) -> None:
        """All that was submitted is done."""

    def shutdown(self) -> None:
        self._device.clear()
        self._chunks.clear()
        self._region.cleanup()

    def _done(self, job_id: int, num_bytes: int) -> bool:
        self._results.append(TransferResult(job_id, success=True, transfer_size=num_bytes, transfer_time=0.0))
        return True

    def _moves(self, device: GPULoadStoreSpec, host: LoadStoreSpec) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        """Per group: device blocks, and for each of them its chunk and its place in that. A group's first chunk may
        begin before its first block."""
        assert isinstance(host, BlockIDsLoadStoreSpec)
        next_block = next_chunk = 0
        for group, (size, index) in enumerate(zip(device.group_sizes, device.block_indices, strict=True)):
            if size == 0:
                continue
            at = np.arange(size) + index % self._blocks_per_chunk
            chunk, place = np.divmod(at, self._blocks_per_chunk)
            blocks = device.block_ids[next_block : next_block + size]
            yield group, _index(blocks), _index(host.block_ids[next_chunk + chunk]), _index(place)
            next_block += size
            next_chunk += int(chunk[-1]) + 1
        assert (next_block, next_chunk) == (len(device.block_ids), len(host.block_ids))


def _index(numbers: "np.ndarray[tuple[int], np.dtype[np.integer]]") -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.int64))
