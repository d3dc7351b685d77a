"""The attention kernels that are measured; where none can be launched, what the engine has on CPU in their place."""

from collections.abc import Callable

from torch import Tensor

from kvtier_bench.gpu.measuring.setting import Setting
from kvtier_bench.gpu.measuring.shapes import Batch, Heads
from kvtier_kernels import paged_attention
from kvtier_kernels.tiles import Tile


def prefilling(setting: Setting, batch: Batch, heads: Heads, *, tile: Tile | None = None) -> Callable[[], Tensor]:
    """`prefix_prefill` of a batch. `tile` is None for what the launcher chooses."""
    if not setting.launches:
        return _on_cpu(batch, heads)
    from kvtier_kernels.attention.prefix_prefill import prefix_prefill

    arguments = batch.arguments(heads, max_seq_len=int(batch.seq_lens.max()))
    return lambda: prefix_prefill(*arguments, tile=tile)


def decoding(setting: Setting, batch: Batch, heads: Heads, *, tile: Tile | None = None) -> Callable[[], Tensor]:
    """`paged_decode` of a batch with one query per sequence. `tile` is None for what the launcher chooses."""
    if not setting.launches:
        return _on_cpu(batch, heads)
    from kvtier_kernels.attention.paged_decode import paged_decode

    arguments = batch.arguments(heads)
    return lambda: paged_decode(*arguments, tile=tile)


def _on_cpu(batch: Batch, heads: Heads) -> Callable[[], Tensor]:
    arguments = batch.arguments(heads)
    return lambda: paged_attention(*arguments)
