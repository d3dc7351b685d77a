"""What is asked of CUDA to capture decodes, noted and not done: kernels run in the interpreter."""

import contextlib
import inspect
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engine_rig import TOKENS_PER_BLOCK
from kvtier.errors import ConfigError
from kvtier_engine.model import cuda_graphs
from kvtier_engine.model.cuda_graphs import with_cuda_graphs
from kvtier_engine.model.llama import LlamaModel
from kvtier_engine.model.paged_kv import allocate_kv
from tiny_model import CONFIG, tiny_model

REAL_GRAPH = torch.cuda.graph


class FakeCuda:
    """Stands in for `torch.cuda`. `notes` tells which stream waited, and on which forward passes ran."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, object]] = []
        self.stream_now = "engine's"
        self.pools: list[object] = []
        self._free_bytes = 100 << 20

    def mem_get_info(self, _device: torch.device) -> tuple[int, int]:
        self._free_bytes -= 7 << 20
        return self._free_bytes, 1 << 30

    def graph_pool_handle(self) -> object:
        return object()

    def current_stream(self) -> Any:
        return _Stream(self, self.stream_now)

    def Stream(self) -> Any:
        return _Stream(self, "aside")

    @contextlib.contextmanager
    def device(self, _device: torch.device) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.stream_now = self.stream_now, stream.name
        yield
        self.stream_now = before

    def CUDAGraph(self) -> object:
        return object()

    @contextlib.contextmanager
    def graph(self, graph: object, **options: Any) -> Iterator[None]:
        inspect.signature(REAL_GRAPH).bind(graph, **options)
        assert options["capture_error_mode"] == "thread_local", "the movers' threads use the device"
        self.pools.append(options["pool"])
        with self.stream(_Stream(self, "capture")):
            yield


class _Stream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self._cuda, self.name = cuda, name

    def wait_stream(self, other: "_Stream") -> None:
        self._cuda.notes.append((f"{self.name} waits for", other.name))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(cuda_graphs.torch, "cuda", fake)
    return fake


class Noted(LlamaModel):
    """Notes which batches it computes on which stream."""

    cuda: FakeCuda

    def compute(self, batch: Any, kv: Any) -> torch.Tensor:
        self.cuda.notes.append((f"computes on {self.cuda.stream_now}", len(batch.token_ids)))
        return super().compute(batch, kv)


def test_decodes_run_once_and_are_captured_then(cuda: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    """Aside from the engine's stream, behind what that holds, and in one pool of memory."""
    model = Noted(CONFIG, tiny_model()._weights)
    model.cuda = cuda
    kv = allocate_kv(CONFIG, 8, TOKENS_PER_BLOCK, torch.float32)
    with caplog.at_level(logging.INFO):
        graphed = with_cuda_graphs(model, kv, max_seqs=3, max_seq_len=16)
    assert graphed.num_graphs == 3
    assert cuda.notes == [
        note
        for size in (3, 2, 1)
        for note in (
            ("aside waits for", "engine's"),
            ("computes on aside", size),
            ("engine's waits for", "aside"),
            ("computes on capture", size),
        )
    ]
    assert len(cuda.pools) == 3
    assert len(set(cuda.pools)) == 1
    assert "3 CUDA graphs of decodes of up to 3 sequences, in " in caplog.text
    assert " s and 7 MiB of device memory" in caplog.text


def test_what_keeps_graphs_from_being_made_is_said_with_a_remedy(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise torch.OutOfMemoryError("no room for 1 byte")

    monkeypatch.setattr(cuda, "CUDAGraph", fails)
    kv = allocate_kv(CONFIG, 8, TOKENS_PER_BLOCK, torch.float32)
    with pytest.raises(ConfigError, match=r"no room for 1 byte; lower engine\.kv_bytes .* set engine\.cuda_graphs"):
        with_cuda_graphs(tiny_model(), kv, max_seqs=3, max_seq_len=16)
