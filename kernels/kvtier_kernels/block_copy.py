"""Many blocks, of all layers, between paged KV and a staging buffer in one launch, as a Triton kernel.

A block of the paged KV is one contiguous row of bytes, and so is its place in a staging buffer: gather and scatter
are the same copy of rows to rows. Rows are moved as integers, 16 bytes a thread where addresses and lengths allow.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from kvtier_kernels.arguments import check_byte_rows, check_index
from kvtier_kernels.launching import COPY_WORDS, check_launchable, on_device_of
from kvtier_kernels.tiles import copy_words


def block_copy(source: Tensor, source_rows: Tensor, target: Tensor, target_rows: Tensor) -> None:
    """`target[target_rows[i]] = source[source_rows[i]]` for all i, byte for byte; other rows stay as they are.

    Waits for nothing: a pair with a row id that does not exist is not copied.

    :param source: `[num_rows, row_elements]` of any dtype, rows contiguous; e.g. `kv.view(num_blocks, -1)`.
    :param target: the same dtype, device and row_elements; does not overlap with `source`.
    :param source_rows: int32 or int64 `[n]`. `target_rows` likewise, distinct.
    :raises ValueError: on a wrong shape, dtype, stride or device.
    """
    check_byte_rows("source", source)
    check_byte_rows("target", target)
    check_launchable("source", source, _copy_kernel)
    if (source.size(1), source.dtype, source.device) != (target.size(1), target.dtype, target.device):
        raise ValueError(
            f"source has rows of {source.size(1)} {source.dtype} on {source.device}, "
            f"target of {target.size(1)} {target.dtype} on {target.device}: must be equal"
        )
    check_index("source_rows", source_rows, (-1,), source.device)
    check_index("target_rows", target_rows, (source_rows.size(0),), source.device)
    row_bytes = source.size(1) * source.element_size()
    unit = _common_unit(source, target, row_bytes)
    word_bytes, words = copy_words(unit, row_bytes)
    chunks = triton.cdiv(row_bytes // word_bytes, words)
    num_programs = source_rows.size(0) * chunks
    if num_programs == 0:
        return
    if num_programs >= 2**31 or row_bytes >= 2**31:
        raise ValueError(f"{source_rows.size(0)} rows of {row_bytes} bytes: too much for a launch; copy in batches")
    word = COPY_WORDS[word_bytes]
    with on_device_of(source):
        _copy_kernel[(num_programs,)](
            source.view(word), source_rows, target.view(word), target_rows,
            _row_units(source, unit), _row_units(target, unit), row_bytes // unit,
            source.size(0), target.size(0), chunks,
            UNIT_WORDS=unit // word_bytes, WORDS=words, num_warps=4,
        )  # fmt: skip


def _common_unit(source: Tensor, target: Tensor, row_bytes: int) -> int:
    """The most bytes, up to 16, that divide all addresses and lengths."""
    numbers = row_bytes
    for rows in (source, target):
        element = rows.element_size()
        # A view as wider integers counts from the start of the storage, the hardware from 0.
        numbers |= rows.data_ptr() | int(rows.storage_offset()) * element | rows.stride(0) * element
    return min(16, numbers & -numbers)


def _row_units(rows: Tensor, unit: int) -> int:
    return rows.stride(0) * rows.element_size() // unit


@triton.jit(do_not_specialize=["source_units", "target_units", "row_units", "num_source", "num_target", "chunks"])
def _copy_kernel(
    source, source_rows, target, target_rows,
    source_units, target_units, row_units, num_source, num_target, chunks,
    UNIT_WORDS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Strides and lengths are in units of UNIT_WORDS words: by that the compiler knows that all of them are
    multiples of it, and makes 16 bytes one access."""
    program = tl.program_id(0)
    index = program // chunks
    word = (program % chunks) * WORDS + tl.arange(0, WORDS)
    from_row = tl.load(source_rows + index).to(tl.int64)
    to_row = tl.load(target_rows + index).to(tl.int64)
    exists = (from_row >= 0) & (from_row < num_source) & (to_row >= 0) & (to_row < num_target)
    mask = (word < row_units * UNIT_WORDS) & exists
    copied = tl.load(source + from_row * source_units * UNIT_WORDS + word, mask=mask)
    tl.store(target + to_row * target_units * UNIT_WORDS + word, copied, mask=mask)
