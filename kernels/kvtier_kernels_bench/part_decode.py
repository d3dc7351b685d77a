"""`paged_decode` beside the memory's bandwidth, and `shared_prefix_decode` beside `paged_decode`."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kvtier.bench.report import Case
from kvtier_kernels_bench.attending import decoding
from kvtier_kernels_bench.rows import row
from kvtier_kernels_bench.setting import Run, Setting
from kvtier_kernels_bench.shapes import heads_of, paged
from kvtier_kernels_bench.timing import DeviceClock, in_turns

_SHAPES = ((1, 65_536), (8, 16_384), (32, 4_096), (128, 4_096))
"""Sequences, and keys of each."""


def plain(setting: Setting) -> Iterator[Case]:
    """GB/s of keys and values read once. The floor reads and writes as many bytes in one plain copy."""
    for num_seqs, num_keys in [(3, 40)] if setting.tiny else _SHAPES:
        if setting.left_s() < 0:
            return
        yield from _plain(setting, num_seqs, num_keys)


def shared(setting: Setting) -> Iterator[Case]:
    """32 sequences that share 4,096 tokens; the floor is `paged_decode` of the same batch."""
    if not setting.launches:
        return
    for own in [8] if setting.tiny else [64, 1024]:
        yield from _shared(setting, setting.size(32, 3), setting.size(4096, 32), own)


def _plain(setting: Setting, num_seqs: int, num_keys: int) -> Iterator[Case]:
    heads = heads_of(setting)
    batch = paged(setting, heads, num_seqs=num_seqs, new=1, cached=num_keys - 1)
    nbytes = num_seqs * heads.kv_bytes(num_keys, setting.dtype.itemsize)
    subjects = {"paged_decode": decoding(setting, batch, heads), "bandwidth": bandwidth(setting, nbytes)}
    samples = in_turns(subjects, setting, DeviceClock(setting).seconds)
    for name, of in samples.items():
        yield row(
            name,
            f"decode of {num_seqs:,} sequences, {num_keys:,} keys each",
            of,
            floor=("bandwidth", samples["bandwidth"]),
            round_bytes=nbytes,
        )


def _shared(setting: Setting, num_seqs: int, num_shared: int, own: int) -> Iterator[Case]:
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
    difference = (sharing().float() - plain().float()).abs().max().item()
    subjects: dict[str, Run] = {"shared_prefix_decode": sharing, "paged_decode": plain}
    samples = in_turns(subjects, setting, DeviceClock(setting).seconds)
    for name, of in samples.items():
        yield row(
            name,
            f"decode of {num_seqs} sequences, {num_shared:,} keys shared, {own:,} each",
            of,
            floor=("paged_decode", samples["paged_decode"]),
            figures={"difference": difference},
        )


def bandwidth(setting: Setting, nbytes: int) -> Run:
    """A plain copy in which the memory moves so many bytes: half of them read, half written."""
    source, target = (torch.ones(nbytes // 2, dtype=torch.uint8, device=setting.device) for _ in range(2))
    return lambda: target.copy_(source)
