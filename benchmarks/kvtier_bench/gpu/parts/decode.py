"""`paged_decode` beside the memory's bandwidth, and `shared_prefix_decode` beside `paged_decode`."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kvtier_bench.gpu.measuring.attending import decoding
from kvtier_bench.gpu.measuring.comparing import require_close
from kvtier_bench.gpu.measuring.each import each
from kvtier_bench.gpu.measuring.rows import Bar, held_to, row
from kvtier_bench.gpu.measuring.setting import Run, Setting
from kvtier_bench.gpu.measuring.shapes import Batch, Heads, dense, heads_of, paged, sequence
from kvtier_bench.gpu.measuring.timing import DeviceClock, in_turns
from kvtier_bench.measuring.report import Case

_SHAPES = ((1, 65_536), (8, 16_384), (32, 4_096), (128, 4_096))
"""Sequences, and keys of each."""
_LEAST_OF_BANDWIDTH, _LEAST_BY_SHARING, _SHARING_BAR_OWN = 0.85, 3.0, 64
"""The last: own keys of each sequence, where what is shared is nearly all."""
_COMPARED = 2
"""The number of sequences that are compared at either end of the batch."""


def plain(setting: Setting) -> Iterator[Case]:
    """GB/s of keys and values read once. The floor is the time in which a large plain copy moves as many bytes."""
    cases: dict[str, Callable[[], Iterator[Case]]] = {}
    for num_seqs, num_keys in [(3, 40)] if setting.tiny else _SHAPES:
        op = f"decode of {num_seqs:,} sequences, {num_keys:,} keys each"
        cases[op] = partial(_plain, setting, op, num_seqs, num_keys)
    yield from each(setting, cases)


def shared(setting: Setting) -> Iterator[Case]:
    """32 sequences that share 4,096 tokens; the floor is `paged_decode` of the same batch."""
    num_seqs, num_shared = setting.size(32, 3), setting.size(4096, 32)
    cases: dict[str, Callable[[], Iterator[Case]]] = {}
    for own in [8] if setting.tiny else [64, 1024]:
        op = f"decode of {num_seqs} sequences, {num_shared:,} keys shared, {own:,} each"
        cases[op] = partial(_shared, setting, op, num_seqs, num_shared, own)
    yield from each(setting, cases)


def _plain(setting: Setting, op: str, num_seqs: int, num_keys: int) -> Iterator[Case]:
    heads = heads_of(setting)
    batch = paged(setting, heads, num_seqs=num_seqs, new=1, cached=num_keys - 1)
    nbytes, moved_bytes = num_seqs * heads.kv_bytes(num_keys, setting.dtype.itemsize), setting.size(4 << 30, 4096)
    decode = decoding(setting, batch, heads)
    require_close("paged_decode", *_compared(decode(), batch, heads))
    subjects: dict[str, Run] = {"paged_decode": decode, "bandwidth": bandwidth(setting, moved_bytes)}
    samples = in_turns(subjects, setting, DeviceClock(setting).seconds)
    samples["bandwidth"] = samples["bandwidth"].scaled(nbytes / moved_bytes)
    for name, of in samples.items():
        case = row(name, op, of, floor=("bandwidth", samples["bandwidth"]), round_bytes=nbytes)
        bar = Bar("x the bandwidth", case.ratio_to_floor or 0.0, _LEAST_OF_BANDWIDTH)
        yield held_to(case, bar, tiny=setting.tiny) if name == "paged_decode" else case


def _shared(setting: Setting, op: str, num_seqs: int, num_shared: int, own: int) -> Iterator[Case]:
    heads = heads_of(setting)
    batch = paged(setting, heads, num_seqs=num_seqs, new=1, cached=num_shared + own - 1, shared=num_shared)
    sharing, plain = _sharing(setting, batch, heads), decoding(setting, batch, heads)
    difference = require_close("shared_prefix_decode", *_compared(sharing(), batch, heads))
    subjects: dict[str, Run] = {"shared_prefix_decode": sharing, "paged_decode": plain}
    samples = in_turns(subjects, setting, DeviceClock(setting).seconds)
    for name, of in samples.items():
        case = row(
            name,
            op,
            of,
            floor=("paged_decode", samples["paged_decode"]),
            figures={"difference": difference},
        )
        bar = Bar("x paged_decode", case.ratio_to_floor or 0.0, _LEAST_BY_SHARING)
        is_held = name == "shared_prefix_decode" and own == _SHARING_BAR_OWN
        yield held_to(case, bar, tiny=setting.tiny) if is_held else case


def _sharing(setting: Setting, batch: Batch, heads: Heads) -> Callable[[], Tensor]:
    """The kernel for shared prefixes; what the engine has on CPU in its place, where no kernel can be launched."""
    if not setting.launches:
        return decoding(setting, batch, heads)
    from kvtier_kernels.attention.shared_prefix_decode import shared_prefix_decode
    from kvtier_kernels.attention.shared_prefixes import SharedPrefixes

    found = SharedPrefixes.of(batch.block_tables.cpu(), batch.seq_lens.cpu(), batch.kv_layer.size(2))
    arguments = batch.arguments(heads, prefixes=found.to(setting.device))
    return lambda: shared_prefix_decode(*arguments)


def _compared(out: Tensor, batch: Batch, heads: Heads) -> tuple[Tensor, Tensor]:
    """The results of some sequences, and what torch makes of their keys in order."""
    order = list(range(len(batch.seq_lens)))
    chosen = sorted({*order[:_COMPARED], *order[-_COMPARED:]})
    group = heads.num_heads // heads.num_kv_heads
    expected = []
    for seq in chosen:
        query, key, value = dense(sequence(batch, seq))
        keys, values = (tensor.repeat_interleave(group, dim=1) for tensor in (key, value))
        expected.append(F.scaled_dot_product_attention(query, keys, values, scale=heads.scale)[0, :, 0])
    return out[chosen], torch.stack(expected)


def bandwidth(setting: Setting, nbytes: int) -> Run:
    """A plain copy in which the memory moves so many bytes: half of them read, half written.

    What it wrote last is still in the cache when it ends: of a small one, that would be much.
    """
    source, target = (torch.ones(nbytes // 2, dtype=torch.uint8, device=setting.device) for _ in range(2))
    return lambda: target.copy_(source)
