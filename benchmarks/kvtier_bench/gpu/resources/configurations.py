"""What every launcher launches, by kinds of arguments: recorded on CPU tensors, for chips that are not here."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from kvtier_bench.gpu.resources.candidates import decode_candidates, prefill_candidates
from kvtier_bench.gpu.resources.compiling import Launch, kernel_modules, recorded
from kvtier_bench.gpu.resources.copy_launches import copy_launches
from kvtier_kernels.attention.attention_batch import AttentionBatch
from kvtier_kernels.attention.paged_decode import paged_decode
from kvtier_kernels.attention.prefix_prefill import prefix_prefill
from kvtier_kernels.attention.shared_prefix_decode import shared_prefix_decode
from kvtier_kernels.attention.shared_prefixes import SharedPrefixes
from kvtier_kernels.invariant.linear import invariant_linear
from kvtier_kernels.invariant.rms_norm import invariant_rms_norm
from kvtier_kernels.scoring import PLAIN, Scoring
from kvtier_kernels.tiles import Tile
from kvtier_kernels.writes.slot_write import write_slots

_Heads = tuple[int, int, int]
HEADS: tuple[_Heads, ...] = ((32, 8, 128), (32, 8, 64), (14, 2, 64), (8, 1, 256))
"""Query heads, KV heads, head dimension: Llama 3's, smaller models', a group that is no power of two, wide heads."""
_SCORINGS: tuple[tuple[str, _Heads, Scoring], ...] = (
    ("soft cap", HEADS[-1], Scoring(soft_cap=50.0)),
    ("slopes", HEADS[0], Scoring(alibi_slopes=torch.empty(HEADS[0][0]))),
    ("sinks", HEADS[1], Scoring(sinks=torch.empty(HEADS[1][0]))),
)
"""What Gemma 2, models with ALiBi and gpt-oss do to scores, with heads like theirs."""
_NUM_SEQS, _TOKENS_PER_BLOCK, _DTYPE = 5, 16, torch.bfloat16


@dataclass(frozen=True, slots=True)
class Configuration:
    """One launcher with one kind of arguments, and how its launches are recorded."""

    name: str
    default: bool
    """Whether the launcher chooses these arguments by itself."""
    record: Callable[[int], list[Launch]]
    """What it launches on a chip of this capability."""


def configurations(*, candidates: int = 0) -> Iterator[Configuration]:
    """Every launcher, in bf16 unless said, and beside each attention tile so many of its candidates."""
    for heads in HEADS:
        name = f"heads {heads[0]}/{heads[1]}x{heads[2]}"
        yield Configuration(f"prefix_prefill {name}", True, partial(_prefill, heads))
        yield Configuration(f"paged_decode {name}", True, partial(_decode, heads))
        yield Configuration(f"shared_prefix_decode {name}", True, partial(_shared_prefix_decode, heads))
        for place in range(1, 1 + candidates):
            prefills, decodes = (partial(of, heads, place) for of in (_prefill_candidate, _decode_candidate))
            yield Configuration(f"prefix_prefill {name} candidate {place}", False, prefills)
            yield Configuration(f"paged_decode {name} candidate {place}", False, decodes)
    for kv_dtype in (torch.int8, torch.float8_e4m3fn):
        name = f"heads 32/8x128 {str(kv_dtype).removeprefix('torch.')}"
        yield Configuration(f"prefix_prefill {name}", True, partial(_prefill, HEADS[0], kv_dtype=kv_dtype))
        yield Configuration(f"paged_decode {name}", True, partial(_decode, HEADS[0], kv_dtype=kv_dtype))
    for name, heads, scoring in _SCORINGS:
        name = f"heads {heads[0]}/{heads[1]}x{heads[2]} {name}"
        yield Configuration(f"prefix_prefill {name}", True, partial(_prefill, heads, scoring=scoring))
        yield Configuration(f"paged_decode {name}", True, partial(_decode, heads, scoring=scoring))
    # What takes most registers: wide heads that are converted, with changed scores.
    name, wide = f"heads {HEADS[-1][0]}/{HEADS[-1][1]}x{HEADS[-1][2]} float8_e4m3fn soft cap", HEADS[-1]
    kv_dtype, scoring = torch.float8_e4m3fn, _SCORINGS[0][2]
    yield Configuration(f"prefix_prefill {name}", True, partial(_prefill, wide, kv_dtype=kv_dtype, scoring=scoring))
    yield Configuration(f"paged_decode {name}", True, partial(_decode, wide, kv_dtype=kv_dtype, scoring=scoring))
    for beside, heads, scoring in (("", HEADS[0], PLAIN), ("soft cap ", *_SCORINGS[0][1:])):
        name = f"prefix_prefill heads {heads[0]}/{heads[1]}x{heads[2]} {beside}invariant"
        yield Configuration(name, True, partial(_prefill, heads, scoring=scoring, invariant=True))
    yield Configuration("linear 4096 to 6144", True, partial(_linear, _DTYPE))
    yield Configuration("linear 4096 to 6144 float32", True, partial(_linear, torch.float32))
    for width in (4096, 128):
        yield Configuration(f"rms_norm of {width}", True, partial(_norm, width))
    yield Configuration("kv_write", True, _write)
    for name, launch in copy_launches():
        yield Configuration(name, True, partial(_copy, launch))


def _launched(chip: int) -> contextlib.AbstractContextManager[list[Launch]]:
    """Whatever is launched meanwhile, in whichever module its kernel is."""
    return recorded(kernel_modules(), divmod(chip, 10))


def _arguments(
    heads: _Heads, num_tokens: int, kv_dtype: torch.dtype = _DTYPE, scoring: Scoring = PLAIN
) -> tuple[Tensor, Tensor, AttentionBatch, Tensor | None]:
    """Attention's arguments, rows of the query and layers of the KV lying as an engine has them; scales."""
    num_heads, num_kv_heads, head_dim = heads
    kv = torch.empty((64, 3, 2, _TOKENS_PER_BLOCK, num_kv_heads, head_dim), dtype=kv_dtype)[:, 1]
    query = torch.empty((num_tokens, num_heads + 2 * num_kv_heads, head_dim), dtype=_DTYPE)[:, :num_heads]
    scales = None if kv_dtype == _DTYPE else torch.empty((64, 3, *kv.shape[1:4]))[:, 1]
    tables, starts = (torch.zeros(shape, dtype=torch.int64) for shape in ((_NUM_SEQS, 20), (_NUM_SEQS + 1,)))
    batch = AttentionBatch(tables, starts, torch.full((_NUM_SEQS,), 50), scale=0.1, scoring=scoring)
    return query, kv, batch, scales


def _prefill(
    heads: _Heads, chip: int, tile: Tile | None = None, kv_dtype: torch.dtype = _DTYPE, scoring: Scoring = PLAIN,
    *, invariant: bool = False,
) -> list[Launch]:  # fmt: skip
    query, kv_layer, batch, scales = _arguments(heads, 300, kv_dtype, scoring)
    with _launched(chip) as launches:
        prefix_prefill(query, kv_layer, replace(batch, invariant=invariant), scales, tile=tile)
    return launches


def _linear(dtype: torch.dtype, chip: int) -> list[Launch]:
    with _launched(chip) as launches:
        invariant_linear(torch.empty((7, 4096), dtype=dtype), torch.empty((6144, 4096), dtype=dtype))
    return launches


def _norm(width: int, chip: int) -> list[Launch]:
    with _launched(chip) as launches:
        invariant_rms_norm(torch.empty((7, width), dtype=_DTYPE), torch.empty(width, dtype=_DTYPE), 1e-5)
    return launches


def _decode(
    heads: _Heads, chip: int, tile: Tile | None = None, kv_dtype: torch.dtype = _DTYPE, scoring: Scoring = PLAIN
) -> list[Launch]:
    """Records decoding without splits, with splits, and the kernel that merges them."""
    arguments = _arguments(heads, _NUM_SEQS, kv_dtype, scoring)
    with _launched(chip) as launches:
        for num_splits in (1, 4):
            paged_decode(*arguments, num_splits=num_splits, tile=tile)
    return launches


def _shared_prefix_decode(heads: _Heads, chip: int) -> list[Launch]:
    """What sequences share, what they do not, and what merges both."""
    query, kv_layer, batch, _ = _arguments(heads, _NUM_SEQS)
    prefixes = SharedPrefixes.of(batch.block_tables, batch.seq_lens, _TOKENS_PER_BLOCK)
    with _launched(chip) as launches:
        shared_prefix_decode(query, kv_layer, replace(batch, prefixes=prefixes))
    return launches


def _prefill_candidate(heads: _Heads, place: int, chip: int) -> list[Launch]:
    """Records a prefill candidate without splits; returns nothing where there are fewer candidates."""
    candidates = prefill_candidates(heads[2], 2, heads[0] // heads[1], divmod(chip, 10))
    return _prefill(heads, chip, candidates[place])[:1] if place < len(candidates) else []


def _decode_candidate(heads: _Heads, place: int, chip: int) -> list[Launch]:
    """Records a decode candidate without splits; returns nothing where there are fewer candidates."""
    candidates = decode_candidates(heads[2], 2, heads[0] // heads[1], divmod(chip, 10))
    return _decode(heads, chip, candidates[place])[:1] if place < len(candidates) else []


def _write(chip: int) -> list[Launch]:
    query, kv_layer, *_ = _arguments(HEADS[0], 7)
    index = torch.zeros(7, dtype=torch.int64)
    with _launched(chip) as launches:
        write_slots(kv_layer, query[:, :8], query[:, :8], index, index)
    return launches


def _copy(launch: Callable[[], None], chip: int) -> list[Launch]:
    with _launched(chip) as launches:
        launch()
    return launches
