"""A step of the engine in which every sequence has one new token: launched operation by operation, and from a graph."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from kvtier_bench.gpu.measuring.comparing import require_close_logits
from kvtier_bench.gpu.measuring.each import each
from kvtier_bench.gpu.measuring.models import model_of
from kvtier_bench.gpu.measuring.rows import row
from kvtier_bench.gpu.measuring.setting import Run, Setting
from kvtier_bench.gpu.measuring.timing import DeviceClock, in_turns
from kvtier_bench.gpu.parts.decode import bandwidth
from kvtier_bench.measuring.report import Case
from kvtier_engine.model.cuda_graphs import CudaRecorder
from kvtier_engine.model.decode_graphs import GraphedModel, Recorder
from kvtier_engine.model.llama import Chunk
from kvtier_engine.model.model_config import ModelConfig
from kvtier_engine.model.paged_kv import PagedKV, allocate_kv

_TOKENS_PER_BLOCK = 16
_Forward = Callable[[Sequence[Chunk], PagedKV], Tensor]
_LAUNCHED, _REPLAYED = "launched", "replayed"


def measure(setting: Setting) -> Iterator[Case]:
    """1 and 16 sequences of 4,096 tokens, by the wall. Logits are compared first with those of each sequence alone.

    The floor is the time in which a large plain copy moves as many bytes as there are weights, keys and values.
    """
    model, config = model_of(setting)
    most, num_keys = setting.size(16, 3), setting.size(4096, 24)
    kv = allocate_kv(config, most * -(-num_keys // _TOKENS_PER_BLOCK), _TOKENS_PER_BLOCK, setting.dtype, setting.device)
    kv.tensor.normal_()
    ways: dict[str, _Forward] = {_LAUNCHED: model.forward}
    if setting.launches:
        ways[_REPLAYED] = GraphedModel(model, kv, recorder_of(setting), max_seqs=most, max_seq_len=num_keys).forward
    tables = torch.randperm(kv.num_blocks).view(most, -1).tolist()
    cases: dict[str, Callable[[], Iterator[Case]]] = {}
    for num_seqs in (1, most):
        op = f"decode step of {num_seqs} sequences, {num_keys:,} keys each"
        chunks = [Chunk([row], num_keys - 1, tables[row]) for row in range(num_seqs)]
        nbytes = (
            _weight_bytes(config, setting.dtype.itemsize) + num_seqs * num_keys // _TOKENS_PER_BLOCK * kv.block_bytes
        )
        cases[op] = partial(_step, setting, op, ways, chunks, kv, nbytes)
    yield from each(setting, cases)


def recorder_of(setting: Setting) -> Recorder:
    """What records graphs; where there is no CUDA, one that shows that the part works."""
    return CudaRecorder(setting.device) if setting.on_cuda else _Again()


def _step(
    setting: Setting, op: str, ways: Mapping[str, _Forward], chunks: Sequence[Chunk], kv: PagedKV, nbytes: int
) -> Iterator[Case]:
    alone = torch.cat([ways[_LAUNCHED]([chunk], kv) for chunk in chunks])
    subjects = {name: partial(way, chunks, kv) for name, way in ways.items()}
    launched = subjects[_LAUNCHED]().clone()
    # Products of other shapes are rounded otherwise, layer after layer.
    require_close_logits(f"{op}, {_LAUNCHED}", launched, alone, setting.dtype)
    for name, subject in subjects.items():  # a graph splits the keys by another number than a launch
        require_close_logits(f"{op}, {name}", subject(), launched, setting.dtype)
    yield from _rows(setting, op, subjects, nbytes)


def _rows(setting: Setting, op: str, ways: Mapping[str, Callable[[], Tensor]], nbytes: int) -> Iterator[Case]:
    clock, moved_bytes = DeviceClock(setting), setting.size(4 << 30, 4096)
    subjects: dict[str, Run] = {**ways, "bandwidth": bandwidth(setting, moved_bytes)}
    samples = in_turns(subjects, setting, clock.wall_s)
    samples["bandwidth"] = samples["bandwidth"].scaled(nbytes / moved_bytes)
    for name, of in samples.items():
        yield row(name, op, of, floor=("bandwidth", samples["bandwidth"]), round_bytes=nbytes)


def _weight_bytes(config: ModelConfig, element_bytes: int) -> int:
    """What a step reads of the weights: the products', without the norms, and not the embedding."""
    heads = 2 * config.num_attention_heads + 2 * config.num_key_value_heads
    layer = config.hidden_size * (heads * config.head_dim + 3 * config.intermediate_size)
    return (config.num_hidden_layers * layer + config.vocab_size * config.hidden_size) * element_bytes


class _Replay:
    """Runs a function again."""

    def __init__(self, run: Callable[[], Tensor]) -> None:
        self._run = run
        self.result = run()

    def replay(self) -> None:
        self.result.copy_(self._run())


class _Again:
    """A recorder where there is no CUDA: shows that the part works."""

    def record(self, run: Callable[[], Tensor]) -> tuple[_Replay, Tensor]:
        replay = _Replay(run)
        return replay, replay.result
