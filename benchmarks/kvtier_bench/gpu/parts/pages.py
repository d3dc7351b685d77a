"""Blocks to and from pinned host memory as vLLM has them on the device: many pages each, one per layer."""

from collections.abc import Iterator
from functools import partial

from kvtier_bench.gpu.measuring.each import each
from kvtier_bench.gpu.measuring.host_copies import host_copies, lends, not_lent
from kvtier_bench.gpu.measuring.layouts import Layout
from kvtier_bench.gpu.measuring.setting import Setting
from kvtier_bench.measuring.report import Case
from kvtier_kernels.records import LossyCodec

_LEAST = 0.8
_LAYOUTS = (
    Layout("32 x 64 KiB", 32, 64 << 10),
    Layout("80 x 8 KiB", 80, 8 << 10),
    Layout("fp8 records of 32 x 64 KiB", 32, 64 << 10, codec=LossyCodec.FP8),
    Layout("two KV groups of 16 x 64 KiB", 16, 64 << 10, num_groups=2),
)
"""Llama 3 8B with 16 tokens a block, a 70B at a tensor parallel size of 8, the 8B with half the bytes, a hybrid."""
_TINY_LAYOUTS = (
    Layout("4 x 1 KiB", 4, 1024),
    Layout("fp8 records", 1, 1024, codec=LossyCodec.FP8),
)


def measure(setting: Setting) -> Iterator[Case]:
    """Every layout, the commonest first."""
    with_lent = lends(setting)
    if not with_lent:
        yield not_lent("pages")
    cases = {
        f"pages, {layout.name}": partial(host_copies, setting, layout, least=_LEAST, with_lent=with_lent)
        for layout in (_TINY_LAYOUTS if setting.tiny else _LAYOUTS)
    }
    yield from each(setting, cases)
