"""The model with `engine.batch_invariant` beside the same without: whether its bits hold, and what that costs."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from kvtier_bench.gpu.measuring.comparing import require_close_logits, require_equal
from kvtier_bench.gpu.measuring.each import each
from kvtier_bench.gpu.measuring.models import weights_of
from kvtier_bench.gpu.measuring.rows import row
from kvtier_bench.gpu.measuring.setting import Run, Setting
from kvtier_bench.gpu.measuring.timing import DeviceClock, in_turns
from kvtier_bench.gpu.parts.step import recorder_of
from kvtier_bench.measuring.report import Case
from kvtier_engine.model.decode_graphs import GraphedModel
from kvtier_engine.model.llama import Chunk, LlamaModel
from kvtier_engine.model.paged_kv import PagedKV, allocate_kv

_TOKENS_PER_BLOCK = 16
_Forward = Callable[[Sequence[Chunk], PagedKV], Tensor]
_PLAIN, _INVARIANT = "plain", "invariant"


def measure(setting: Setting) -> Iterator[Case]:
    """2,048 new tokens, and steps of 1 and 16 sequences of 4,096 tokens, by the wall; decodes replayed.

    First the invariant model's logits and KV are compared bit for bit: a prompt in one pass with the same in chunks,
    with other sequences beside it; sequences together with each alone, launched and replayed.
    """
    weights, config = weights_of(setting)
    models = {name: LlamaModel(config, weights, batch_invariant=name == _INVARIANT) for name in (_PLAIN, _INVARIANT)}
    most, num_keys, num_new = setting.size(16, 3), setting.size(4096, 32), setting.size(2048, 24)
    kv = allocate_kv(config, most * num_keys // _TOKENS_PER_BLOCK, _TOKENS_PER_BLOCK, setting.dtype, setting.device)
    kv.tensor.normal_()
    tables = torch.randperm(kv.num_blocks).view(most, -1).tolist()
    launched: dict[str, _Forward] = {name: model.forward for name, model in models.items()}
    replayed = launched
    if setting.on_cuda:  # in the interpreter, launched and replayed steps take different ways
        replayed = {
            name: GraphedModel(model, kv, recorder_of(setting), max_seqs=most, max_seq_len=num_keys).forward
            for name, model in models.items()
        }
    tokens = torch.randint(config.vocab_size, (num_new,)).tolist()
    cases: dict[str, Callable[[], Iterator[Case]]] = {}
    prefill = f"{num_new:,} new tokens"
    cases[prefill] = partial(_prefill, setting, prefill, launched, tokens, tables, kv)
    for num_seqs in (1, most):
        op = f"decode step of {num_seqs} sequences, {num_keys:,} keys each"
        chunks = [Chunk([row], num_keys - 1, tables[row]) for row in range(num_seqs)]
        cases[op] = partial(_decode, setting, op, (launched, replayed), chunks, kv)
    yield from each(setting, cases)


def _prefill(
    setting: Setting,
    op: str,
    ways: Mapping[str, _Forward],
    tokens: Sequence[int],
    tables: Sequence[Sequence[int]],
    kv: PagedKV,
) -> Iterator[Case]:
    whole, length, forward = [Chunk(tokens, 0, tables[0])], len(tokens), ways[_INVARIANT]
    blocks = tables[0][: -(-length // _TOKENS_PER_BLOCK)]
    expected = forward(whole, kv).clone()
    expected_kv = kv.tensor[blocks].clone()
    for start, stop in itertools.pairwise((0, 1, length // 3, length - 2, length - 1, length)):
        beside = [Chunk(tokens[: 1 + start % 5], 0, table) for table in tables[1:]]
        logits = forward([*beside, Chunk(tokens[start:stop], start, tables[0])], kv)[-1:]
    require_equal(f"{op}, logits in chunks beside others", logits, expected)
    require_equal(f"{op}, KV in chunks beside others", kv.tensor[blocks], expected_kv)
    require_close_logits(f"{op}, {_PLAIN}", ways[_PLAIN](whole, kv), expected, setting.dtype)
    yield from _rows(setting, op, {name: partial(way, whole, kv) for name, way in ways.items()})


def _decode(
    setting: Setting,
    op: str,
    ways: tuple[Mapping[str, _Forward], Mapping[str, _Forward]],
    chunks: Sequence[Chunk],
    kv: PagedKV,
) -> Iterator[Case]:
    launched, replayed = ways
    alone = torch.cat([launched[_INVARIANT]([chunk], kv) for chunk in chunks])
    for name, way in (("launched", launched), ("replayed", replayed)):
        require_equal(f"{op}, {name}, beside {len(chunks) - 1}", way[_INVARIANT](chunks, kv), alone)
    require_close_logits(f"{op}, {_PLAIN}", replayed[_PLAIN](chunks, kv), alone, setting.dtype)
    yield from _rows(setting, op, {name: partial(way, chunks, kv) for name, way in replayed.items()})


def _rows(setting: Setting, op: str, subjects: Mapping[str, Run]) -> Iterator[Case]:
    samples = in_turns(subjects, setting, DeviceClock(setting).wall_s)
    for name, of in samples.items():
        yield row(name, op, of, floor=(_PLAIN, samples[_PLAIN]))
