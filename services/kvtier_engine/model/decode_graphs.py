"""Decodes replayed from graphs: one launch for a step, where there are hundreds otherwise.

A step in which each of few sequences has one new token is over on the device before the host has launched each
operation of each layer. A CUDA graph holds all these launches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvtier_engine.model.decode_inputs import DecodeInputs
from kvtier_engine.model.llama import Batch, Chunk, LlamaModel
from kvtier_engine.model.paged_kv import PagedKV
from kvtier_kernels import AttentionBatch, decode_attention, find_shared_prefixes


class Graph(Protocol):
    """Operations that were recorded: `torch.cuda.CUDAGraph`."""

    def replay(self) -> object:
        """Launches them again, with the tensors that they had: what is in these now is what is computed with."""
        ...


class Recorder(Protocol):
    """Makes graphs: `CudaRecorder`."""

    def record(self, run: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
        """What `run` launches, and the tensor that each replay leaves its result in.

        :param run: called more than once. It must not wait for the device, nor decide anything by values on it.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Decode:
    """A recorded decode step of a fixed number of rows, and the logits that it computes."""

    graph: Graph
    logits: Tensor


class GraphedModel:
    """A model for the scheduler: decodes are replayed, everything else goes to the model itself. Engine's thread only.

    A batch of decodes is filled up to the next size that there is a graph of: 1, 2, 4, 8 and so on. A row too many
    writes to no block, reads none, and takes as much time as others in matrix products.

    Decodes over shared blocks are launched one by one where reading these blocks once saves more than that costs.
    """

    def __init__(self, model: LlamaModel, kv: PagedKV, recorder: Recorder, *, max_seqs: int, max_seq_len: int) -> None:
        """Records all graphs, each of which runs the model twice. Changes no block.

        :param kv: what `forward` will be given; for other KV nothing is replayed.
        :param max_seqs: the largest batch that is replayed.
        :param max_seq_len: the longest sequence that is replayed.
        """
        self._model, self._kv = model, kv
        table_width = -(-max_seq_len // kv.tokens_per_block)
        self._inputs = DecodeInputs(max_seqs, table_width, kv.tokens_per_block, kv.tensor.device)
        with torch.inference_mode():
            # The largest first: what it needs of memory between its operations, the others can use as well.
            self._decodes = {
                size: _Decode(*recorder.record(lambda size=size: self._compute(size)))  # type: ignore[misc]
                for size in reversed(graph_sizes(max_seqs))
            }

    @property
    def num_graphs(self) -> int:
        return len(self._decodes)

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk], kv: PagedKV) -> Tensor:
        """`LlamaModel.forward`. The logits are good until the next call."""
        # A graph waits for nothing, and what is launched waits for one layer after the other.
        if kv.tensor is not self._kv.tensor or kv.is_arriving or not self._inputs.holds(chunks):
            return self._model.forward(chunks, kv)
        self._inputs.fill(chunks)
        if self._sharing_pays(chunks):
            return self._model.forward(chunks, kv)
        decode = self._decodes[min(size for size in self._decodes if size >= len(chunks))]
        decode.graph.replay()
        return decode.logits[: len(chunks)]

    def _sharing_pays(self, chunks: Sequence[Chunk]) -> bool:
        if self._model.batch_invariant:
            return False
        index = self._inputs.tables_on_host(chunks)
        return find_shared_prefixes(*index, self._kv.layer(0), self._model.num_heads, replayed=True) is not None

    def _compute(self, size: int) -> Tensor:
        """A step of so many rows: what is recorded."""
        inputs = self._inputs
        attend = decode_attention(
            (inputs.block_ids[:size], inputs.offsets[:size]),
            AttentionBatch(
                inputs.block_tables[:size],
                None,
                inputs.seq_lens[:size],
                scale=self._model.scale,
                invariant=self._model.batch_invariant,
            ),
        )
        return self._model.compute(Batch(inputs.token_ids[:size], inputs.positions[:size], attend, None), self._kv)


def graph_sizes(max_seqs: int) -> list[int]:
    """Powers of two below `max_seqs`, and that itself."""
    return [*(1 << exponent for exponent in range((max_seqs - 1).bit_length())), max_seqs]
