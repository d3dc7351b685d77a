"""Every Triton kernel against the reference on the GPU at hand: `python -m kvtier_kernels.selfcheck [SHARE OF]`.

Prints a line per check. Exits with 0 when all pass, 1 when one fails, 2 when there is no GPU. Needs torch and triton
and nothing else of kvtier. Takes some minutes, most of them compiling, on one core: processes that each take a share,
`0 4` to `3 4` say, take as much less.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from kvtier_kernels.attention.attention_batch import AttentionBatch
from kvtier_kernels.attention.shared_prefixes import SharedPrefixes
from kvtier_kernels.quantise_reference import quantise_reference
from kvtier_kernels.reference import (
    kv_write_reference,
    merge_states_reference,
    paged_attention_reference,
)
from kvtier_kernels.scoring import Scoring
from kvtier_kernels.selfcheck.accuracy import attention_bound, lse_bound, merge_bound, merge_lse_bound
from kvtier_kernels.selfcheck.copies import Check, copy_checks, random_bits
from kvtier_kernels.selfcheck.invariance import invariance_checks

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEADS = ((32, 8, 128), (9, 3, 64), (14, 2, 64), (8, 1, 256), (4, 4, 80))
"""Query heads, KV heads, head dimension."""
BLOCK_SIZES = (16, 1, 256)
_MOST_CHARACTERS = 500
"""The most characters of an error that are printed: a compiler's may be pages."""


@dataclass(frozen=True, slots=True)
class _Case:
    """Paged attention's arguments on CPU. What no key occupies is NaN."""

    query: Tensor
    kv_layer: Tensor
    batch: AttentionBatch
    kv_scales: Tensor | None = None

    def on(self, device: torch.device) -> tuple[Tensor, Tensor, AttentionBatch, Tensor | None]:
        batch, starts = self.batch, torch.tensor(self.batch.starts_on_host())
        there = replace(
            batch,
            block_tables=batch.block_tables.to(device),
            query_starts=starts.to(device),
            seq_lens=batch.seq_lens.to(device),
            scoring=batch.scoring.to(device),
            prefixes=batch.prefixes and batch.prefixes.to(device),
        )
        scales = None if self.kv_scales is None else _strided(self.kv_scales).to(device)[:, 1]
        return self.query.to(device), _strided(self.kv_layer).to(device)[:, 1], there, scales


def run_checks(
    device: torch.device, *, longest: int = 3000, share: int = 0, num_shares: int = 1
) -> Iterator[tuple[str, str]]:
    """Name and failure of each check, the latter empty when it passed.

    :param device: CUDA; CPU where Triton interprets its kernels, which then takes minutes unless `longest` is small.
    :param longest: keys of the longest sequence.
    :param share: only every `num_shares`-th check, from this one on.
    """
    for name, check in itertools.islice(all_checks(device, longest), share, None, num_shares):
        yield name, failure_of(check)


def failure_of(check: Check) -> str:
    """Runs it. What it raises is its failure: of a kernel that does not compile, or that the chip does not take."""
    try:
        return check()
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())[:_MOST_CHARACTERS]


def all_checks(device: torch.device, longest: int) -> Iterator[tuple[str, Check]]:
    """Name, whose first word is the kernel's, and check of each. Arguments as for `run_checks`."""
    lengths = [longest, 1, longest // 3 + 1, 64, 65, 63]
    prefill = list(zip([longest // 10, 1, longest // 3 + 1, 7, 65, 1], lengths, strict=True))
    decode = [(1, length) for length in lengths]
    for dtype, (index, heads) in itertools.product(DTYPES, enumerate(HEADS)):
        tokens_per_block = BLOCK_SIZES[index % len(BLOCK_SIZES)]
        name = f"{str(dtype).removeprefix('torch.')} heads {heads[0]}/{heads[1]}x{heads[2]} block {tokens_per_block}"
        case = _make(prefill, heads, tokens_per_block, dtype)
        yield f"prefix_prefill {name}", partial(_check_prefill, case, device)
        yield f"invariant_prefill {name}", partial(_check_invariant, case, device)
        case = _make(decode, heads, tokens_per_block, dtype)
        yield f"shared_prefix_decode {name}", partial(_check_shared, _sharing(case), device)
        yield f"merge_states {name}", partial(_check_merge, heads, dtype, device)
        for num_splits in (1, 5, None):
            yield (
                f"paged_decode {name} splits {num_splits or 'auto'}",
                partial(_check_decode, case, num_splits, device),
            )
        yield f"kv_write {name}", partial(_check_write, heads, tokens_per_block, dtype, device)
    for heads, tokens_per_block in zip(HEADS, (16, 64), strict=False):
        of_both = _make(prefill, heads, tokens_per_block, DTYPES[0]), _make(decode, heads, tokens_per_block, DTYPES[0])
        for variant, change in VARIANTS.items():
            name = f"{variant} heads {heads[0]}/{heads[1]}x{heads[2]} block {tokens_per_block}"
            prefill_case, decode_case = map(change, of_both)
            yield f"prefix_prefill {name} splits 4", partial(_check_prefill, prefill_case, device, 4)
            yield f"invariant_prefill {name}", partial(_check_invariant, prefill_case, device)
            yield f"paged_decode {name}", partial(_check_decode, decode_case, None, device)
    yield from copy_checks(device)
    yield from invariance_checks(device, DTYPES)


def _make(
    lengths: Sequence[tuple[int, int]], heads: tuple[int, int, int], tokens_per_block: int, dtype: torch.dtype
) -> _Case:
    """:param lengths: queries and keys of each sequence."""
    num_heads, num_kv_heads, head_dim = heads
    generator = torch.Generator().manual_seed(len(lengths) + head_dim)
    blocks = [-(-keys // tokens_per_block) for _, keys in lengths]
    order = torch.randperm(sum(blocks) + 2, generator=generator)
    layer = torch.full((len(order), 2, tokens_per_block, num_kv_heads, head_dim), math.nan, dtype=dtype)
    tables = torch.full((len(lengths), max(blocks)), -1, dtype=torch.int64)
    for seq, (num_blocks, (_, keys)) in enumerate(zip(blocks, lengths, strict=True)):
        mine, order = order[:num_blocks], order[num_blocks:]
        tables[seq, :num_blocks] = mine
        rows = torch.randn(2, keys, num_kv_heads, head_dim, generator=generator).to(dtype)
        position = torch.arange(keys)
        layer[mine[position // tokens_per_block], :, position % tokens_per_block] = rows.transpose(0, 1)
    starts = torch.tensor([0, *itertools.accumulate(queries for queries, _ in lengths)])
    query = torch.randn(int(starts[-1]), num_heads, head_dim, generator=generator).to(dtype)
    batch = AttentionBatch(tables, starts, torch.tensor([keys for _, keys in lengths]), scale=head_dim**-0.5)
    return _Case(query, layer, batch)


def _strided(view: Tensor) -> Tensor:
    """`[num_blocks, 2, ...]`, the second of each two being `view`: a copy of it alone would be contiguous."""
    both = torch.stack([view, view], dim=1)
    both[:, 0] = 0
    return both


def _quantised(case: _Case, dtype: torch.dtype) -> _Case:
    stored, scales = quantise_reference(case.kv_layer.float(), dtype)
    return replace(case, kv_layer=stored, kv_scales=scales)


def _windowed(case: _Case, window: int = 70) -> _Case:
    """What no query sees has block ids that do not exist."""
    batch, starts = case.batch, torch.tensor(case.batch.starts_on_host())
    tables, first = batch.block_tables.clone(), batch.seq_lens - starts.diff() - window + 1
    for seq, num_unseen in enumerate((first.clamp(min=0) // case.kv_layer.size(2)).tolist()):
        tables[seq, :num_unseen] = -1
    return replace(case, batch=replace(batch, block_tables=tables, window=window))


def _scored(case: _Case) -> _Case:
    numbers = torch.linspace(-1.0, 2.0, case.query.size(1))
    scoring = Scoring(soft_cap=1.5, alibi_slopes=torch.exp2(-3 * numbers), sinks=2 * numbers)
    return replace(case, batch=replace(case.batch, scoring=scoring))


VARIANTS: dict[str, Callable[[_Case], _Case]] = {
    "window": _windowed,
    "int8": lambda case: _quantised(case, torch.int8),
    "float8 window": lambda case: _windowed(_quantised(case, torch.float8_e4m3fn)),
    "soft cap, slopes, sinks": _scored,
}


def _check_prefill(case: _Case, device: torch.device, num_splits: int | None = None) -> str:
    from kvtier_kernels.attention.prefix_prefill import prefix_prefill

    lse = torch.full(case.query.shape[:2], math.nan, device=device)
    return _compare(case, prefix_prefill(*case.on(device), lse, num_splits=num_splits), lse)


def _check_invariant(case: _Case, device: torch.device) -> str:
    """Compares the newest query of each sequence, too, as the only one that is computed, bit for bit."""
    from kvtier_kernels.attention.prefix_prefill import prefix_prefill

    case = replace(case, batch=replace(case.batch, invariant=True))
    query, kv_layer, batch, scales = case.on(device)
    lse = torch.full(case.query.shape[:2], math.nan, device=device)
    out = prefix_prefill(query, kv_layer, batch, scales, lse)
    newest = torch.tensor(batch.starts_on_host()[1:], device=device) - 1
    alone_lse = torch.full_like(lse[newest], math.nan)
    decodes = replace(batch, query_starts=None).with_starts()
    alone = prefix_prefill(query[newest], kv_layer, decodes, scales, alone_lse)
    if not (torch.equal(alone, out[newest]) and torch.equal(alone_lse, lse[newest])):
        return "queries alone have other bits than beside others"
    return _compare(case, out, lse)


def _check_decode(case: _Case, num_splits: int | None, device: torch.device) -> str:
    from kvtier_kernels.attention.paged_decode import paged_decode

    lse = torch.full(case.query.shape[:2], math.nan, device=device)
    return _compare(case, paged_decode(*case.on(device), lse, num_splits=num_splits), lse)


def _sharing(case: _Case) -> _Case:
    """The first sequence and the third begin alike, and the fourth and the fifth, as far as their full blocks go."""
    tables, lens, tokens_per_block = case.batch.block_tables.clone(), case.batch.seq_lens, case.kv_layer.size(2)
    for seq, other in ((0, 2), (3, 4)):
        num_full = int(lens[[seq, other]].min()) // tokens_per_block
        tables[other, :num_full] = tables[seq, :num_full]
    prefixes = SharedPrefixes.of(tables, lens, tokens_per_block)
    return replace(case, batch=replace(case.batch, block_tables=tables, prefixes=prefixes))


def _check_shared(case: _Case, device: torch.device) -> str:
    from kvtier_kernels.attention.shared_prefix_decode import shared_prefix_decode

    lse = torch.full(case.query.shape[:2], math.nan, device=device)
    return _compare(case, shared_prefix_decode(*case.on(device), lse), lse)


def _check_merge(heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> str:
    from kvtier_kernels.attention.merge_states import merge_states

    generator = torch.Generator().manual_seed(heads[0])
    parts = torch.randn((37, heads[0], 2, heads[2]), generator=generator).to(dtype)
    part_lse = 10 * torch.randn(parts.shape[:3], generator=generator)
    parts[5, :, 1], part_lse[5, :, 1] = math.nan, -math.inf
    out = torch.full_like(parts[:, :, 0], math.nan, device=device, memory_format=torch.contiguous_format)
    lse = torch.full(parts.shape[:2], math.nan, device=device)
    merge_states(parts.to(device), part_lse.to(device), out, lse)
    expected, expected_lse = merge_states_reference(parts, part_lse)
    return _within("output", out, expected, merge_bound(parts, part_lse, dtype)) or _within(
        "log-sum-exp", lse, expected_lse, merge_lse_bound(part_lse)
    )


def _compare(case: _Case, out: Tensor, lse: Tensor) -> str:
    arguments = case.query, case.kv_layer, case.batch, case.kv_scales
    expected_lse = torch.full(case.query.shape[:2], math.nan)
    expected = paged_attention_reference(*arguments, expected_lse)
    return _within("output", out, expected, attention_bound(*arguments)) or _within(
        "log-sum-exp", lse, expected_lse, lse_bound(*arguments)
    )


def _within(name: str, got: Tensor, expected: Tensor, bound: float) -> str:
    worst = (got.double().cpu() - expected).abs().max().item()
    # A NaN is not.
    return "" if worst <= bound else f"{name} is off by {worst:.3g}, allowed are {bound:.3g}"


def _check_write(heads: tuple[int, int, int], tokens_per_block: int, dtype: torch.dtype, device: torch.device) -> str:
    from kvtier_kernels.writes.slot_write import write_slots

    _, kv_heads, head_dim = heads
    as_int = torch.int32 if dtype.itemsize == 4 else torch.int16
    kv = random_bits((40, 2, 2, tokens_per_block, kv_heads, head_dim), as_int)
    fused = random_bits((37, 2 * kv_heads + 1, head_dim), as_int)
    key, value = fused[:, :kv_heads], fused[:, kv_heads + 1 :]
    places = torch.randperm(40 * tokens_per_block)[:37]
    index = places // tokens_per_block, places % tokens_per_block
    there, fused_there = kv.to(device, copy=True).view(dtype), fused.to(device).view(dtype)
    write_slots(
        there[:, 1], fused_there[:, :kv_heads], fused_there[:, kv_heads + 1 :], *(tensor.to(device) for tensor in index)
    )
    kv_write_reference(kv[:, 1], key, value, *index)
    return "" if torch.equal(there.view(as_int).cpu(), kv) else "bits differ"


def main(share: int = 0, num_shares: int = 1, *, write: Callable[[str], None] = print) -> int:
    """The exit status. `share` and `num_shares` are as in `run_checks`."""
    if not torch.cuda.is_available():
        write("no CUDA device: nothing was checked")
        return 2
    import triton

    write(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    num_failed = 0
    device = torch.device("cuda", torch.cuda.current_device())
    for name, failure in run_checks(device, share=share, num_shares=num_shares):
        write(f"{'FAILED' if failure else 'ok':6} {name}{': ' if failure else ''}{failure}")
        num_failed += bool(failure)
    write(f"{num_failed} failed" if num_failed else "all passed")
    return 1 if num_failed else 0
