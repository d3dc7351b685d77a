"""What launchers choose, beside what else they might: tried on the chip at hand, for `tiles` and `copy_tiles`."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from kvtier.bench.report import Case
from kvtier_kernels.launching import capability, num_multiprocessors
from kvtier_kernels.tiles import Tile
from kvtier_kernels_bench.candidates import decode_candidates, label, prefill_candidates
from kvtier_kernels_bench.rows import row
from kvtier_kernels_bench.setting import Run, Setting
from kvtier_kernels_bench.shapes import Heads, heads_of, paged
from kvtier_kernels_bench.timing import DeviceClock, in_turns

_ROUNDS = 5
_PROGRAMS = (2, 8, 16, 32, 66, 132)
"""That reach host memory over the bus at a time."""
_SHARES = {"programs beside host memory": 0.15, "tiles of prefill": 0.55, "tiles of decode": 0.3}
"""Of the part's time: a prefill tile takes longest to compile, and there are most that may be better."""


def measure(setting: Setting) -> Iterator[Case]:
    """Each candidate in turn with the default, until the time for its kind is over."""
    if not setting.launches:
        return
    heads, whole_s, used = heads_of(setting), setting.left_s(), 0.0
    chip, group = capability(setting.device), heads.num_heads // heads.num_kv_heads
    of_tiles = (heads.head_dim, setting.dtype.itemsize, group, chip)
    subjects: dict[str, Callable[[], list[tuple[str, Run]]]] = {
        "programs beside host memory": lambda: _host_copies(setting),
        "tiles of prefill": lambda: _prefills(setting, heads, prefill_candidates(*of_tiles)),
        "tiles of decode": lambda: _decodes(setting, heads, decode_candidates(*of_tiles)),
    }
    for op, make in subjects.items():
        used += _SHARES[op]
        yield from _sweep(setting, op, make(), until_s=whole_s * (1 - used))


def _sweep(setting: Setting, op: str, subjects: list[tuple[str, Run]], until_s: float) -> Iterator[Case]:
    """
    :param subjects: names and what to time, the default first.
    :param until_s: seconds of the part's time that are others'.
    """
    clock, (default, *others) = DeviceClock(setting), subjects
    for name, run in others[: setting.size(len(others), 2)]:
        if setting.left_s() < until_s:
            return
        try:
            both, rounds = {default[0]: default[1], name: run}, _ROUNDS if setting.on_cuda else 1
            samples = in_turns(both, setting, clock.seconds, rounds=rounds)
        except Exception as error:  # a tile that does not compile, or does not fit after all, is no end of the sweep
            yield Case(name, f"sweep of {op}", detail=f"failed: {type(error).__name__}: {error}"[:200])
            continue
        floor = ("the default", samples[default[0]])
        yield row(name, f"sweep of {op}, default {default[0]}", samples[name], floor=floor)


def _prefills(setting: Setting, heads: Heads, tiles: Sequence[Tile]) -> list[tuple[str, Run]]:
    from kvtier_kernels.prefix_prefill import prefix_prefill

    of = paged(setting, heads, num_seqs=1, new=setting.size(2048, 5), cached=setting.size(16_384, 9))
    arguments = (of.query, of.kv_layer, of.block_tables, of.query_starts, of.seq_lens)
    return [(label(tile), partial(prefix_prefill, *arguments, scale=heads.scale, tile=tile)) for tile in tiles]


def _decodes(setting: Setting, heads: Heads, tiles: Sequence[Tile]) -> list[tuple[str, Run]]:
    from kvtier_kernels.paged_decode import paged_decode

    of = paged(setting, heads, num_seqs=setting.size(32, 2), new=1, cached=setting.size(4095, 9))
    arguments = (of.query, of.kv_layer, of.block_tables, of.seq_lens)
    return [(label(tile), partial(paged_decode, *arguments, scale=heads.scale, tile=tile)) for tile in tiles]


def _host_copies(setting: Setting) -> list[tuple[str, Run]]:
    """Scattered blocks of 2 MiB to pinned memory by `block_copy`, with other numbers of programs."""
    from kvtier_kernels.block_copy import block_copy
    from kvtier_kernels.copy_tiles import host_copy_programs

    count, block_bytes = setting.size(128, 3), setting.size(2 << 20, 4096)
    kv = torch.zeros((2 * count, block_bytes), dtype=torch.uint8, device=setting.device)
    pinned = torch.empty((count, block_bytes), dtype=torch.uint8, pin_memory=setting.on_cuda)
    blocks, rows = (torch.randperm(number)[:count].to(setting.device) for number in (2 * count, count))
    default = host_copy_programs(num_multiprocessors(setting.device))
    return [
        (f"{programs} programs", partial(block_copy, kv, blocks, pinned, rows, max_programs=programs))
        for programs in (default, *(other for other in _PROGRAMS if other != default))
    ]
