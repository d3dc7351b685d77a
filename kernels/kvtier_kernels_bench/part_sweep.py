"""Other tiles than the default, tried on the chip at hand: what `kvtier_kernels.tiles` should choose there."""

from collections.abc import Callable, Iterator

from torch import Tensor

from kvtier.bench.report import Case
from kvtier_kernels.launching import capability
from kvtier_kernels.tiles import Tile, prefill_candidates
from kvtier_kernels_bench.candidates import decode_candidates, label
from kvtier_kernels_bench.rows import row
from kvtier_kernels_bench.setting import Setting
from kvtier_kernels_bench.shapes import Batch, heads_of, paged
from kvtier_kernels_bench.timing import DeviceClock, in_turns

_ROUNDS = 5
_PREFILL_SHARE = 0.65
"""Of the part's time: a prefill tile takes longer to compile, and there are more that may be better."""


def measure(setting: Setting) -> Iterator[Case]:
    """Each candidate in turn with the default, until the time is over."""
    if not setting.launches:
        return
    yield from _sweep(setting, "prefill", setting.left_s() * (1 - _PREFILL_SHARE))
    yield from _sweep(setting, "decode", 0.0)


def _sweep(setting: Setting, op: str, reserved_s: float) -> Iterator[Case]:
    """:param reserved_s: of the time that is left, what others need."""
    heads, clock = heads_of(setting), DeviceClock(setting)
    candidates, batch, attend = _prefill(setting) if op == "prefill" else _decode(setting)
    group = heads.num_heads // heads.num_kv_heads
    default, *others = candidates(heads.head_dim, setting.dtype.itemsize, group, capability(setting.device))
    for tile in others[: setting.size(len(others), 2)]:
        if setting.left_s() < reserved_s:
            return
        try:
            samples = in_turns(
                {label(of): lambda of=of: attend(batch, of) for of in (default, tile)},  # type: ignore[misc]
                setting,
                clock.seconds,
                rounds=_ROUNDS if setting.on_cuda else 1,
            )
        except Exception as error:  # a tile that does not compile, or does not fit after all, is no end of the sweep
            yield Case(label(tile), f"sweep of {op}", detail=f"failed: {type(error).__name__}: {error}"[:200])
            continue
        yield row(
            label(tile),
            f"sweep of {op}, default {label(default)}",
            samples[label(tile)],
            floor=("the default", samples[label(default)]),
        )


_Attend = Callable[[Batch, Tile], Tensor]
_Candidates = Callable[[int, int, int, tuple[int, int]], tuple[Tile, ...]]


def _prefill(setting: Setting) -> tuple[_Candidates, Batch, _Attend]:
    from kvtier_kernels.prefix_prefill import prefix_prefill

    heads = heads_of(setting)
    batch = paged(setting, heads, num_seqs=1, new=setting.size(2048, 5), cached=setting.size(16_384, 9))

    def attend(batch: Batch, tile: Tile) -> Tensor:
        return prefix_prefill(
            batch.query,
            batch.kv_layer,
            batch.block_tables,
            batch.query_starts,
            batch.seq_lens,
            scale=heads.scale,
            tile=tile,
        )

    return prefill_candidates, batch, attend


def _decode(setting: Setting) -> tuple[_Candidates, Batch, _Attend]:
    from kvtier_kernels.paged_decode import paged_decode

    heads = heads_of(setting)
    batch = paged(setting, heads, num_seqs=setting.size(32, 2), new=1, cached=setting.size(4095, 9))

    def attend(batch: Batch, tile: Tile) -> Tensor:
        return paged_decode(
            batch.query, batch.kv_layer, batch.block_tables, batch.seq_lens, scale=heads.scale, tile=tile
        )

    return decode_candidates, batch, attend
