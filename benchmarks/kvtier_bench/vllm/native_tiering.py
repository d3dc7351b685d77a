"""vLLM's own tiers without a GPU: all of them as they are, but for the worker that copies between device and host."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

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

from kvtier.errors import KvtierError
from kvtier.memory.copy_ranges import copy_from, ranges_of

_Columns = list[tuple[int, int]]
"""Each layer's address, and the bytes from one block to the next."""


class HostTieringSpec(TieringOffloadingSpec):
    """vLLM's `TieringOffloadingSpec`, with a "GPU" that is this host's memory."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        region = SharedOffloadRegion(
            engine_id=self.config.engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return HostCopyWorker(kv_caches, region, self.blocks_per_chunk)


class HostCopyWorker(OffloadingWorker):
    """Copies blocks within this host's memory, with a thread behind the engine's for each direction, in order.

    As fast as kvtier's own movers copy: with the same calls.
    """

    def __init__(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion, blocks_per_chunk: int) -> None:
        if blocks_per_chunk != 1 or len(kv_caches.group_data_refs) != 1:
            raise KvtierError("vLLM's tiers are measured with one block per chunk and one group of layers")
        self._region = region
        self._tensors = kv_caches.tensors  # keeps the memory
        self._widths = [each.page_size_bytes for each in kv_caches.tensors]
        pages = [each.tensor for each in kv_caches.tensors]
        self._device: _Columns = [(page.data_ptr(), page.stride(0) * page.element_size()) for page in pages]
        rows = [region.create_next_worker_view(width) for width in self._widths]
        self._host: _Columns = [(row.data_ptr(), row.stride(0)) for row in rows]
        self._stores, self._loads = ThreadPoolExecutor(1, "store"), ThreadPoolExecutor(1, "load")
        self._jobs: dict[int, Future[int]] = {}
        """Bytes copied, by job."""

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        ids = _ids(src_spec), _ids(dst_spec)
        self._jobs[job_id] = self._stores.submit(self._copy, self._device, ids[0], self._host, ids[1])
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        ids = _ids(src_spec), _ids(dst_spec)
        self._jobs[job_id] = self._loads.submit(self._copy, self._host, ids[0], self._device, ids[1])
        return True

    def get_finished(self) -> list[TransferResult]:
        ended = [job_id for job_id, job in self._jobs.items() if job.done()]
        return [TransferResult(job_id, True, self._jobs.pop(job_id).result()) for job_id in ended]

    def wait(self, job_ids: set[int]) -> None:
        wait([self._jobs[job_id] for job_id in job_ids if job_id in self._jobs])

    def shutdown(self) -> None:
        self._stores.shutdown()
        self._loads.shutdown()
        self._region.cleanup()

    def _copy(self, source: _Columns, source_ids: Sequence[int], into: _Columns, into_ids: Sequence[int]) -> int:
        ranges = ranges_of(source_ids, source, self._widths)
        if not copy_from(ranges, ranges_of(into_ids, into, self._widths)):
            raise KvtierError("this system does not copy with process_vm_readv: vLLM's own tiers cannot be measured")
        return int(ranges[:, 1].sum())


def _ids(spec: Any) -> Sequence[int]:
    assert isinstance(spec, BlockIDsLoadStoreSpec)
    ids: list[int] = spec.block_ids.tolist()
    return ids
