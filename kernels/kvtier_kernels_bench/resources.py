"""`python -m kvtier_kernels_bench.resources`: what every kernel takes of a chip, without one.

Compiles every launcher's kernels ahead of time, as it would launch them, for each chip: registers, shared memory, bytes
spilled. Needs triton and no GPU. About 2 s per kernel and chip, from triton's cache none.
"""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import triton
from torch import Tensor

from kvtier_kernels.merge_states import merge_two_states
from kvtier_kernels.paged_decode import paged_decode
from kvtier_kernels.prefix_prefill import prefix_prefill
from kvtier_kernels.shared_prefix_decode import shared_prefix_decode
from kvtier_kernels.shared_prefixes import SharedPrefixes
from kvtier_kernels.slot_write import write_slots
from kvtier_kernels.tiles import Tile, decode_tile, prefill_tile
from kvtier_kernels_bench.candidates import label, neighbours
from kvtier_kernels_bench.compiling import (
    SHARED_LIMIT_BYTES,
    Launch,
    compile_launch,
    kernel_modules,
    recorded,
    usage_of,
)
from kvtier_kernels_bench.copy_launches import copy_launches
from kvtier_kernels_bench.shapes import Batch

CHIPS = (80, 90, 100)
_Heads = tuple[int, int, int]
HEADS: tuple[_Heads, ...] = ((32, 8, 128), (32, 8, 64), (14, 2, 64), (8, 1, 256))
"""Query heads, KV heads, head dimension: Llama 3's, smaller models', a group that is no power of two, wide heads."""
_NUM_SEQS, _TOKENS_PER_BLOCK, _DTYPE = 5, 16, torch.bfloat16


@dataclass(frozen=True, slots=True)
class Configuration:
    """One launcher with one kind of arguments."""

    name: str
    default: bool
    """It is what the launcher chooses by itself."""
    record: Callable[[int], list[Launch]]
    """What it launches on a chip of this capability. Raises `ValueError` where the launcher refuses."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What one kernel takes."""

    kernel: str
    configuration: str
    default: bool
    chip: int
    """Compute capability, e.g. 90."""
    registers: int
    """Of a thread."""
    shared_bytes: int
    """Of a program."""
    shared_limit_bytes: int
    spilled_bytes: int
    """Of a thread."""
    num_warps: int


def configurations(*, candidates: int = 0) -> Iterator[Configuration]:
    """All launchers, in bf16 unless said, and beside each attention tile so many others of `neighbours`."""
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
    yield Configuration("merge_two_states", True, _merge_two_states)
    yield Configuration("kv_write", True, _write)
    for name, launch in copy_launches():
        yield Configuration(name, True, partial(_copy, launch))


def resources(
    chips: Sequence[int] = CHIPS,
    *,
    candidates: int = 0,
    only: str = "",
    done: Callable[[Resources], None] | None = None,
) -> list[Resources]:
    """Compiles, chip by chip, all configurations with `only` in their names.

    :param done: called with each as it is known.
    """
    found: list[Resources] = []
    for chip in chips:
        for configuration in configurations(candidates=candidates):
            if only not in configuration.name:
                continue
            for launch in configuration.record(chip):
                found.append(_compiled(configuration, launch, chip))
                if done is not None:
                    done(found[-1])
    return found


def _compiled(configuration: Configuration, launch: Launch, chip: int) -> Resources:
    kernel = compile_launch(launch, chip)
    usage = usage_of(kernel)
    name = configuration.name
    if "ROWS" in launch.arguments and "KEYS" in launch.arguments:
        tile = Tile(launch.arguments["ROWS"], launch.arguments["KEYS"], **launch.options)
        name = f"{name} {label(tile)}"
    return Resources(
        kernel=launch.name,
        configuration=name,
        default=configuration.default,
        chip=chip,
        registers=usage.registers,
        shared_bytes=kernel.metadata.shared,
        shared_limit_bytes=SHARED_LIMIT_BYTES[chip],
        spilled_bytes=usage.spilled_bytes,
        num_warps=kernel.metadata.num_warps,
    )


def _launched(chip: int) -> contextlib.AbstractContextManager[list[Launch]]:
    """Whatever is launched meanwhile, in whichever module its kernel is."""
    return recorded(kernel_modules(), divmod(chip, 10))


def _batch(heads: _Heads, num_tokens: int, kv_dtype: torch.dtype = _DTYPE) -> tuple[Batch, Tensor | None]:
    """Attention's arguments, rows of the query and layers of the KV lying as an engine has them; scales."""
    num_heads, num_kv_heads, head_dim = heads
    kv = torch.empty((64, 3, 2, _TOKENS_PER_BLOCK, num_kv_heads, head_dim), dtype=kv_dtype)[:, 1]
    query = torch.empty((num_tokens, num_heads + 2 * num_kv_heads, head_dim), dtype=_DTYPE)[:, :num_heads]
    scales = None if kv_dtype == _DTYPE else torch.empty((64, 3, *kv.shape[1:4]))[:, 1]
    tables, starts = (torch.zeros(shape, dtype=torch.int64) for shape in ((_NUM_SEQS, 20), (_NUM_SEQS + 1,)))
    return Batch(query, kv, tables, starts, torch.full((_NUM_SEQS,), 50)), scales


def _prefill(heads: _Heads, chip: int, tile: Tile | None = None, kv_dtype: torch.dtype = _DTYPE) -> list[Launch]:
    of, scales = _batch(heads, 300, kv_dtype)
    with _launched(chip) as launches:
        prefix_prefill(
            of.query, of.kv_layer, of.block_tables, of.query_starts, of.seq_lens,
            scale=0.1, kv_scales=scales, tile=tile,
        )  # fmt: skip
    return launches


def _decode(heads: _Heads, chip: int, tile: Tile | None = None, kv_dtype: torch.dtype = _DTYPE) -> list[Launch]:
    """Without splits, with splits, and what merges them."""
    of, scales = _batch(heads, _NUM_SEQS, kv_dtype)
    with _launched(chip) as launches:
        for num_splits in (1, 4):
            paged_decode(
                of.query, of.kv_layer, of.block_tables, of.seq_lens,
                scale=0.1, kv_scales=scales, num_splits=num_splits, tile=tile,
            )  # fmt: skip
    return launches


def _shared_prefix_decode(heads: _Heads, chip: int) -> list[Launch]:
    """What sequences share, what they do not, and what merges both."""
    of, _ = _batch(heads, _NUM_SEQS)
    prefixes = SharedPrefixes.of(of.block_tables, of.seq_lens, _TOKENS_PER_BLOCK)
    with _launched(chip) as launches:
        shared_prefix_decode(of.query, of.kv_layer, of.block_tables, of.seq_lens, prefixes, scale=0.1)
    return launches


def _merge_two_states(chip: int) -> list[Launch]:
    state, lse = torch.empty((5, 32, 128), dtype=_DTYPE), torch.empty((5, 32))
    with _launched(chip) as launches:
        merge_two_states(state, lse, state.clone(), lse.clone())
    return launches


def _prefill_candidate(heads: _Heads, place: int, chip: int) -> list[Launch]:
    tile = _candidate(prefill_tile, heads, place, chip)
    return [] if tile is None else _prefill(heads, chip, tile)


def _decode_candidate(heads: _Heads, place: int, chip: int) -> list[Launch]:
    """Without splits."""
    tile = _candidate(decode_tile, heads, place, chip)
    return [] if tile is None else _decode(heads, chip, tile)[:1]


def _candidate(
    choose: Callable[[int, int, int, tuple[int, int]], Tile], heads: _Heads, place: int, chip: int
) -> Tile | None:
    """The tile at `place` among the default's neighbours; None where there are fewer."""
    capability, group = divmod(chip, 10), heads[0] // heads[1]
    default = choose(heads[2], 2, group, capability)
    around = neighbours(default, head_dim=heads[2], element_bytes=2, group=group, capability=capability)
    return around[place] if place < len(around) else None


def _write(chip: int) -> list[Launch]:
    of, _ = _batch(HEADS[0], 7)
    index = torch.zeros(7, dtype=torch.int64)
    with _launched(chip) as launches:
        write_slots(of.kv_layer, of.query[:, :8], of.query[:, :8], index, index)
    return launches


def _copy(launch: Callable[[], None], chip: int) -> list[Launch]:
    with _launched(chip) as launches:
        launch()
    return launches


def line(of: Resources) -> str:
    """A row of the table."""
    spilled = f"{of.spilled_bytes:,} spilled" if of.spilled_bytes else ""
    return (
        f"sm_{of.chip:<4}{of.kernel:<22}{of.configuration:<58}{of.registers:>4} registers"
        f"{of.shared_bytes:>9,} of {of.shared_limit_bytes:,} shared  {of.num_warps:>2} warps  {spilled}"
    ).rstrip()


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 1 when a default configuration spills or does not fit its chip."""
    parser = argparse.ArgumentParser(prog="python -m kvtier_kernels_bench.resources", description=__doc__)
    parser.add_argument("--chip", type=int, action="append", choices=sorted(SHARED_LIMIT_BYTES), help="e.g. 90")
    parser.add_argument("--candidates", type=int, default=0, help="other tiles beside each default of attention")
    parser.add_argument("--only", default="", help="configurations with this in their name")
    parser.add_argument("--json", type=Path, help="also write all of it there")
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1: kernels are interpreted in this process, not compiled")
    print(f"triton {triton.__version__}, ahead of time: nothing of this ran", flush=True)
    found = resources(
        options.chip or CHIPS,
        candidates=options.candidates,
        only=options.only,
        done=lambda of: print(line(of), flush=True),
    )
    if options.json is not None:
        content = {"triton": triton.__version__, "kernels": [asdict(of) for of in found]}
        options.json.write_text(json.dumps(content, indent=2) + "\n")
    bad = [of for of in found if of.default and (of.spilled_bytes or of.shared_bytes > of.shared_limit_bytes)]
    for of in bad:
        print(f"FAILED {line(of)}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
