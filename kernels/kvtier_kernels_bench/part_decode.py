"""`paged_decode` beside the memory's bandwidth, and `shared_prefix_decode` beside `paged_decode`."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kvtier.bench.report import Case
from kvtier_kernels_bench.attending import decoding
from kvtier_kernels_bench.rows import disagreement, left_out, row
from kvtier_kernels_bench.setting import Run, Setting
from kvtier_kernels_bench.shapes import heads_of, paged
from kvtier_kernels_bench.timing import DeviceClock, in_turns

_SHAPES = ((1, 65_536), (8, 16_384), (32, 4_096), (128, 4_096))
"""Sequences, and keys of each."""


def plain(setting: Setting) -> Iterator[Case]:
    """GB/s of keys and values read once. The floor is the time in which a large plain copy moves as many bytes."""
    for num_seqs, num_keys in [(3, 40)] if setting.tiny else _SHAPES:
        op = f"decode of {num_seqs:,} sequences, {num_keys:,} keys each"
        if setting.left_s() < 0:
            yield left_out(op)
            continue
        yield from _plain(setting, op, num_seqs, num_keys)


def shared(setting: Setting) -> Iterator[Case]:
    """32 sequences that share 4,096 tokens; the floor is `paged_decode` of the same batch."""
    if not setting.launches:
        return
    num_seqs, num_shared = setting.size(32, 3), setting.size(4096, 32)
    for own in [8] if setting.tiny else [64, 1024]:
        op = f"decode of {num_seqs} sequences, {num_shared:,} keys shared, {own:,} each"
        yield from _shared(setting, op, num_seqs, num_shared, own)


def _plain(setting: Setting, op: str, num_seqs: int, num_keys: int) -> Iterator[Case]:
    heads = heads_of(setting)
    batch = paged(setting, heads, num_seqs=num_seqs, new=1, cached=num_keys - 1)
    nbytes, moved_bytes = num_seqs * heads.kv_bytes(num_keys, setting.dtype.itemsize), setting.size(4 << 30, 4096)
    subjects = {"paged_decode": decoding(setting, batch, heads), "bandwidth": bandwidth(setting, moved_bytes)}
    samples = in_turns(subjects, setting, DeviceClock(setting).seconds)
    samples["bandwidth"] = samples["bandwidth"].scaled(nbytes / moved_bytes)
    for name, of in samples.items():
        yield row(
            name,
            op,
            of,
            floor=("bandwidth", samples["bandwidth"]),
            round_bytes=nbytes,
        )


def _shared(setting: Setting, op: str, num_seqs: int, num_shared: int, own: int) -> Iterator[Case]:
    from kvtier_kernels.shared_prefix_decode import shared_prefix_decode
    from kvtier_kernels.shared_prefixes import SharedPrefixes

    heads = heads_of(setting)
    batch = paged(setting, heads, num_seqs=num_seqs, new=1, cached=num_shared + own - 1, shared=num_shared)
    found = SharedPrefixes.of(batch.block_tables.cpu(), batch.seq_lens.cpu(), batch.kv_layer.size(2))
    prefixes = found.to(setting.device)

    def sharing() -> Tensor:
        return shared_prefix_decode(
            batch.query, batch.kv_layer, batch.block_tables, batch.seq_lens, prefixes, scale=heads.scale
        )

    plain = decoding(setting, batch, heads)
    expected = plain().float()
    difference = (sharing().float() - expected).abs().max().item()
    yield from disagreement("shared_prefix_decode", op, difference, expected.abs().max().item())
    subjects: dict[str, Run] = {"shared_prefix_decode": sharing, "paged_decode": plain}
    samples = in_turns(subjects, setting, DeviceClock(setting).seconds)
    for name, of in samples.items():
        yield row(
            name,
            op,
            of,
            floor=("paged_decode", samples["paged_decode"]),
            figures={"difference": difference},
        )


def bandwidth(setting: Setting, nbytes: int) -> Run:
    """A plain copy in which the memory moves so many bytes: half of them read, half written.

    What it wrote last is still in the cache when it ends: of a small one, that would be much.
    """
    source, target = (torch.ones(nbytes // 2, dtype=torch.uint8, device=setting.device) for _ in range(2))
    return lambda: target.copy_(source)
