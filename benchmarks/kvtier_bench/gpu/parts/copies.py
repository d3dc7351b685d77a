"""Contiguous blocks on the device and to pinned host memory, each beside one plain copy of as many bytes."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from kvtier_bench.gpu.measuring.comparing import require_equal
from kvtier_bench.gpu.measuring.each import each
from kvtier_bench.gpu.measuring.host_copies import host_copies, lends, not_lent
from kvtier_bench.gpu.measuring.layouts import Layout
from kvtier_bench.gpu.measuring.rows import Bar, held_to, row
from kvtier_bench.gpu.measuring.setting import Run, Setting
from kvtier_bench.gpu.measuring.timing import DeviceClock, in_turns
from kvtier_bench.measuring.report import Case
from kvtier_bench.measuring.rounds import Samples
from kvtier_kernels.reference import block_copy_reference

_BLOCK_BYTES = {2 << 20: 0.9, 256 << 10: 0.8}
"""The sizes of blocks, and what their copies to and from the host are held to: a share of one large copy's speed."""
_TINY_BLOCK_BYTES = {4096: 0.0, 1024: 0.0}
_LEAST_ON_DEVICE = 0.85


def on_device(setting: Setting) -> Iterator[Case]:
    """`block_copy` of scattered blocks, beside one copy of as many. GB/s of payload: each byte is read and written."""
    sizes = _block_sizes(setting)
    yield from each(setting, {f"device to device, {of:,} bytes": partial(_on_device, setting, of) for of in sizes})


def to_host(setting: Setting) -> Iterator[Case]:
    """What engines have between contiguous blocks and arenas; then `block_copy` straight to and from host memory."""
    with_lent = lends(setting)
    if not with_lent:
        yield not_lent("contiguous blocks")
    cases: dict[str, Callable[[], Iterator[Case]]] = {}
    for block_bytes, least in _block_sizes(setting).items():
        layout = Layout("contiguous blocks", 1, block_bytes)
        copies = partial(host_copies, setting, layout, least=least, with_lent=with_lent)
        cases[f"host copies, {block_bytes:,} bytes"] = copies
    for block_bytes in _block_sizes(setting):
        cases[f"host copies by a kernel, {block_bytes:,} bytes"] = partial(_by_kernel, setting, block_bytes)
    yield from each(setting, cases)


def _on_device(setting: Setting, block_bytes: int) -> Iterator[Case]:
    count = setting.size(1 << 30, 4 * block_bytes) // block_bytes
    source, target = (_random(setting, 2 * count, block_bytes) for _ in range(2))
    rows = [torch.randperm(2 * count)[:count].to(setting.device) for _ in range(2)]
    subjects: dict[str, Run] = {
        "block_copy": _copy(setting, source, rows[0], target, rows[1]),
        "plain copy": partial(target[:count].copy_, source[:count]),
    }
    samples = in_turns(subjects, setting, DeviceClock(setting).seconds)
    for case in _rows("device to device", samples, "plain copy", count, block_bytes):
        bar = Bar("x a plain copy", case.ratio_to_floor or 0.0, _LEAST_ON_DEVICE)
        yield held_to(case, bar, tiny=setting.tiny) if case.name == "block_copy" else case


def _by_kernel(setting: Setting, block_bytes: int) -> Iterator[Case]:
    """A kernel of few programs reaches pinned memory over the bus."""
    count = setting.size(512 << 20, 4 * block_bytes) // block_bytes
    kv = _random(setting, 2 * count, block_bytes)
    pinned = torch.empty((count, block_bytes), dtype=torch.uint8, pin_memory=setting.on_cuda)
    blocks = torch.randperm(2 * count)[:count].to(setting.device)
    slots = torch.randperm(count).to(setting.device)
    down: dict[str, Run] = {
        "one copy": lambda: pinned.copy_(kv[:count], non_blocking=True),
        "block_copy": _copy(setting, kv, blocks, pinned, slots),
    }
    up: dict[str, Run] = {
        "one copy": lambda: kv[:count].copy_(pinned, non_blocking=True),
        "block_copy": _copy(setting, pinned, slots, kv, blocks),
    }
    for op, subjects in (("device to pinned host", down), ("pinned host to device", up)):
        samples = in_turns(subjects, setting, DeviceClock(setting).seconds)
        yield from _rows(f"{op}, by a kernel", samples, "one copy", count, block_bytes)


def _copy(setting: Setting, source: Tensor, source_rows: Tensor, target: Tensor, target_rows: Tensor) -> Run:
    """`block_copy` of these, which has been compared once: on the device, where only pinned memory has to go.

    :raises WrongResultError: a block did not arrive, or another one changed.
    """
    copy_blocks = block_copy_of(setting)
    expected = target.to(setting.device, copy=True)
    expected[target_rows] = source.to(setting.device)[source_rows]
    copy_blocks(source, source_rows, target, target_rows)
    setting.synchronize()
    require_equal("block_copy", target.to(setting.device), expected)
    return lambda: copy_blocks(source, source_rows, target, target_rows)


def block_copy_of(setting: Setting) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
    """The block copy; on CPU its reference, since Triton's interpreter does not take its masks as they are."""
    if not setting.on_cuda:
        return block_copy_reference
    from kvtier_kernels.copies.block_copy import block_copy

    return block_copy


def _rows(op: str, samples: Mapping[str, Samples], floor: str, count: int, block_bytes: int) -> Iterator[Case]:
    for name, of in samples.items():
        yield row(
            name,
            op,
            of,
            floor=(floor, samples[floor]),
            round_bytes=count * block_bytes,
            payload_bytes=block_bytes,
            batch=count,
        )


def _block_sizes(setting: Setting) -> Mapping[int, float]:
    return _TINY_BLOCK_BYTES if setting.tiny else _BLOCK_BYTES


def _random(setting: Setting, count: int, block_bytes: int) -> Tensor:
    return torch.randint(0, 256, (count, block_bytes), dtype=torch.uint8, device=setting.device)
