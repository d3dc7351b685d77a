"""CUDA graphs of decodes: the calls that need a GPU."""

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from kvtier.clock import MONOTONIC
from kvtier.errors import ConfigError
from kvtier_engine.model.decode_graphs import GraphedModel
from kvtier_engine.model.llama import LlamaModel
from kvtier_engine.model.paged_kv import PagedKV

_MIB = 1 << 20

log = logging.getLogger(__name__)


def with_cuda_graphs(model: LlamaModel, kv: PagedKV, *, max_seqs: int, max_seq_len: int) -> GraphedModel:
    """The model with its decodes as CUDA graphs, which `GraphedModel` describes. Call it in the engine's thread.

    :raises ConfigError: they cannot be had, most likely for lack of memory.
    """
    device, started_s = kv.tensor.device, MONOTONIC()
    try:
        free_bytes, _ = torch.cuda.mem_get_info(device)
        graphed = GraphedModel(model, kv, CudaRecorder(device), max_seqs=max_seqs, max_seq_len=max_seq_len)
        taken_bytes = free_bytes - torch.cuda.mem_get_info(device)[0]
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        raise ConfigError(
            f"engine.cuda_graphs: no graphs of decodes on {device}: {error}; lower engine.kv_bytes if memory is what "
            "lacks, or set engine.cuda_graphs to false"
        ) from error
    log.info(
        "%d CUDA graphs of decodes of up to %d sequences, in %.1f s and %d MiB of device memory",
        graphed.num_graphs, max_seqs, MONOTONIC() - started_s, taken_bytes // _MIB,
    )  # fmt: skip
    return graphed


class CudaRecorder:
    """Makes CUDA graphs that have their memory in common. One thread.

    So a graph may be replayed only when nobody needs the result of another one any more.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Runs it once, so that kernels are compiled and loaded and libraries have chosen theirs; then captures it.

        Other threads may use the device meanwhile: what they must not do beside a capture, only this thread must not.
        """
        with torch.cuda.device(self._device):
            current, aside = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
            aside.wait_stream(current)
            with torch.cuda.stream(aside):
                run()
            current.wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                logits = run()
        return graph, logits
