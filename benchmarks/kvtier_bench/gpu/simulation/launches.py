"""Copies that are put on a stream of a simulated device where they would be done at once, or need a GPU."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvtier.device import cuda_routes, kv_group
from kvtier_bench.gpu.simulation.cuda import SimulatedCuda
from kvtier_kernels.copies.part_copy import Parts


class _PutsWorkOnStreams(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Queues every operation that changes a tensor in its place, `Tensor.copy_` above all, on the current stream."""

    def __init__(self, cuda: SimulatedCuda) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cuda = cuda

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), options: Any = None) -> Any:
        options = options or {}
        if self._cuda.runs_work or not function._schema.name.endswith("_"):
            return function(*args, **options)
        target: Tensor = args[0]
        nbytes = target.numel() * target.element_size()
        if function is torch.ops.aten.copy_.default:
            self._cuda.launch_copy(lambda: function(*args), args[1].data_ptr(), target.data_ptr(), nbytes)
        else:
            self._cuda.launch(lambda: function(*args, **options), nbytes=nbytes)
        return target


@contextlib.contextmanager
def simulated_launches(cuda: SimulatedCuda) -> Iterator[None]:
    """Sends what `CudaKV` launches within the context to the simulated device's streams."""
    enter = cuda.stream

    @contextlib.contextmanager
    def stream(stream: Any) -> Iterator[None]:
        with enter(stream), _PutsWorkOnStreams(cuda):
            yield

    copies = _Kernels(cuda)
    with (
        mock.patch.object(cuda, "stream", stream),
        mock.patch.object(cuda_routes, "block_copy", copies.block_copy),
        mock.patch.object(kv_group, "block_copy", copies.block_copy),
        mock.patch.object(kv_group, "part_copy", copies.part_copy),
    ):
        yield


class _Kernels:
    """The kernels of `CudaKV` in plain torch. Rows that do not exist are left out, as by the kernels."""

    def __init__(self, cuda: SimulatedCuda) -> None:
        self._cuda = cuda

    def block_copy(self, source: Tensor, source_rows: Tensor, target: Tensor, target_rows: Tensor) -> None:
        def copy() -> None:
            there = _there(source_rows, source) & _there(target_rows, target)
            target[target_rows[there]] = source[source_rows[there]]

        nbytes = source_rows.numel() * source.size(1) * source.element_size()
        self._cuda.launch_copy(copy, source.data_ptr(), target.data_ptr(), nbytes)

    def part_copy(
        self, parts: Parts, block_ids: Tensor, staging: Tensor, staging_rows: Tensor, *, gather: bool
    ) -> None:
        num_parts = len(parts.tensors)
        by_part = staging.view(staging.size(0), num_parts, -1).transpose(0, 1) if staging.dim() == 2 else staging

        def copy() -> None:
            there = _there(block_ids, parts.tensors[0]) & _there(staging_rows, by_part[0])
            for part, staged in zip(parts.tensors, by_part, strict=True):
                if gather:
                    staged[staging_rows[there]] = part[block_ids[there]]
                else:
                    part[block_ids[there]] = staged[staging_rows[there]]

        nbytes = block_ids.numel() * parts.block_bytes
        source, target = parts.tensors[0].data_ptr(), by_part.data_ptr()
        self._cuda.launch_copy(copy, *((source, target) if gather else (target, source)), nbytes)


def _there(rows: Tensor, memory: Tensor) -> Tensor:
    return (rows >= 0) & (rows < memory.size(0))
