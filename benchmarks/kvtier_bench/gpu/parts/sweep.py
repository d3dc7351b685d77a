"""What launchers choose, beside what else they might: tried on the chip at hand, for `tiles` and `copy_tiles`.

A candidate gives what the default gives, or is not timed. Without a GPU, what the engine has on CPU stands for each.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kvtier_bench.gpu.measuring.attending import decoding, prefilling
from kvtier_bench.gpu.measuring.comparing import WrongResultError, require_close, require_equal
from kvtier_bench.gpu.measuring.each import each
from kvtier_bench.gpu.measuring.rows import failure, row
from kvtier_bench.gpu.measuring.setting import Run, Setting
from kvtier_bench.gpu.measuring.shapes import Heads, heads_of, paged
from kvtier_bench.gpu.measuring.timing import DeviceClock, in_turns
from kvtier_bench.gpu.parts.copies import block_copy_of
from kvtier_bench.gpu.resources.candidates import decode_candidates, label, prefill_candidates
from kvtier_bench.measuring.report import Case
from kvtier_kernels.copies.copy_tiles import host_copy_programs
from kvtier_kernels.launching import capability, num_multiprocessors
from kvtier_kernels.tiles import Tile

_ROUNDS = 5
_PROGRAMS = (2, 8, 16, 32, 66, 132)
"""The numbers of programs that reach host memory over the bus at a time."""
_SHARES = {"programs beside host memory": 0.15, "tiles of prefill": 0.55, "tiles of decode": 0.3}
"""The shares of the part's time: a prefill tile takes longest to compile, and more of these may be better."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A configuration of one launcher."""

    name: str
    run: Run
    result: Callable[[], Tensor]
    """Runs it, and gives what it should have in common with the others."""


def measure(setting: Setting) -> Iterator[Case]:
    """Each candidate in turn with the default, until the time for its kind is over."""
    heads, whole_s, used = heads_of(setting), setting.left_s(), 0.0
    chip, group = capability(setting.device), heads.num_heads // heads.num_kv_heads
    of_tiles = (heads.head_dim, setting.dtype.itemsize, group, chip)
    subjects: dict[str, Callable[[], list[_Candidate]]] = {
        "programs beside host memory": lambda: _host_copies(setting),
        "tiles of prefill": lambda: _prefills(setting, heads, prefill_candidates(*of_tiles)),
        "tiles of decode": lambda: _decodes(setting, heads, decode_candidates(*of_tiles)),
    }
    cases: dict[str, Callable[[], Iterator[Case]]] = {}
    for op, make in subjects.items():
        used += _SHARES[op]
        cases[f"sweep of {op}"] = partial(_sweep, setting, op, make, until_s=whole_s * (1 - used))
    yield from each(setting, cases)


def _sweep(setting: Setting, op: str, make: Callable[[], list[_Candidate]], until_s: float) -> Iterator[Case]:
    """
    :param make: makes the candidates, the default first.
    :param until_s: seconds of the part's time that are others'.
    """
    clock, (default, *others) = DeviceClock(setting), make()
    for other in others[: setting.size(len(others), 2)]:
        if setting.left_s() < until_s:
            return
        try:
            _compare(other.name, other.result(), default.result())
            both, rounds = {default.name: default.run, other.name: other.run}, _ROUNDS if setting.on_cuda else 1
            samples = in_turns(both, setting, clock.seconds, rounds=rounds)
        except WrongResultError as error:
            yield failure(other.name, f"sweep of {op}", str(error))
        except Exception as error:  # a tile that does not compile, or does not fit after all, is no end of the sweep
            yield Case(other.name, f"sweep of {op}", detail=f"failed: {type(error).__name__}: {error}"[:200])
        else:
            floor = ("the default", samples[default.name])
            yield row(other.name, f"sweep of {op}, default {default.name}", samples[other.name], floor=floor)


def _compare(name: str, got: Tensor, expected: Tensor) -> None:
    """Numbers may be rounded otherwise, bytes may not.

    :raises WrongResultError: they differ.
    """
    if got.dtype == torch.uint8:
        require_equal(name, got, expected)
    else:
        require_close(name, got, expected)


def _prefills(setting: Setting, heads: Heads, tiles: Sequence[Tile]) -> list[_Candidate]:
    of = paged(setting, heads, num_seqs=1, new=setting.size(2048, 5), cached=setting.size(16_384, 9))
    return [_attending(tile, prefilling(setting, of, heads, tile=tile)) for tile in tiles]


def _decodes(setting: Setting, heads: Heads, tiles: Sequence[Tile]) -> list[_Candidate]:
    of = paged(setting, heads, num_seqs=setting.size(32, 2), new=1, cached=setting.size(4095, 9))
    return [_attending(tile, decoding(setting, of, heads, tile=tile)) for tile in tiles]


def _attending(tile: Tile, run: Callable[[], Tensor]) -> _Candidate:
    return _Candidate(label(tile), run, run)


def _host_copies(setting: Setting) -> list[_Candidate]:
    """Scattered blocks of 2 MiB to pinned memory by `block_copy`, with other numbers of programs."""
    count, block_bytes = setting.size(128, 3), setting.size(2 << 20, 4096)
    kv = torch.randint(0, 256, (2 * count, block_bytes), dtype=torch.uint8, device=setting.device)
    pinned = torch.empty((count, block_bytes), dtype=torch.uint8, pin_memory=setting.on_cuda)
    blocks, rows = (torch.randperm(number)[:count].to(setting.device) for number in (2 * count, count))
    copy = partial(block_copy_of(setting), kv, blocks, pinned, rows)

    def candidate(programs: int) -> _Candidate:
        run = partial(copy, max_programs=programs) if setting.on_cuda else copy

        def result() -> Tensor:
            pinned.zero_()
            run()
            setting.synchronize()
            return pinned.clone()  # the next candidate writes there too

        return _Candidate(f"{programs} programs", run, result)

    default = host_copy_programs(num_multiprocessors(setting.device))
    return [candidate(programs) for programs in (default, *(other for other in _PROGRAMS if other != default))]
