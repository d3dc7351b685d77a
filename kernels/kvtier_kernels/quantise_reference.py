"""Quantised KV in plain torch: the oracle of the kernels that make it on the way."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvtier_kernels.records import RecordLayout

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest magnitude that can be stored."""
_E4M3_NAN = 0x7F


def quantise_reference(vectors: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Stored values, `[..., head_dim]` of this dtype, and float32 scales, `[...]`, as `records` says."""
    wide = vectors.float()
    peak = wide.abs().amax(-1)
    scales = torch.where(peak.isfinite(), peak / LARGEST[dtype], torch.inf)
    scales = scales.masked_fill(scales == 0, 1.0)
    ratio = (wide / scales[..., None]).masked_fill(scales[..., None].isinf(), 0.0)
    return stored_reference(ratio, dtype), scales


def stored_reference(ratio: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest that int8 or float8_e4m3fn can hold, ties to even; what is too large is the largest."""
    clamped = ratio.clamp(-LARGEST[dtype], LARGEST[dtype])
    if dtype == torch.int8:
        return clamped.round().to(torch.int8)
    codes = clamped.to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.masked_fill(ratio.isnan(), _E4M3_NAN).view(torch.float8_e4m3fn)


def dequantise_reference(stored: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """`[..., head_dim]` of dtype; NaN where the scale is infinite."""
    values = (stored.float() * scales[..., None]).to(dtype)
    return values.masked_fill(scales[..., None].isinf(), torch.nan)


def to_records(pages: Tensor, layout: RecordLayout) -> Tensor:
    """uint8 `[num_pages, layout.record_bytes]`, fresh, of uint8 `[num_pages, layout.page_bytes]`, rows contiguous."""
    vectors = pages.view(layout.dtype).view(-1, layout.num_vectors, layout.head_dim)
    stored, scales = quantise_reference(vectors, layout.codec.stored_dtype)
    records = torch.zeros((len(pages), layout.record_bytes), dtype=torch.uint8, device=pages.device)
    # As integers: torch does not copy float8 into a view of bytes.
    layout.values(records).view(torch.int8).copy_(stored.view(torch.int8))
    layout.scales(records).copy_(scales)
    return records


def from_records(records: Tensor, layout: RecordLayout) -> Tensor:
    """The inverse but for what quantising has cost: fresh, contiguous. Records begin at multiples of 4 bytes."""
    restored = dequantise_reference(layout.values(records), layout.scales(records), layout.dtype)
    return restored.view(torch.uint8).view(len(records), layout.page_bytes)


def quantised_copy_reference(
    parts: Sequence[Tensor],
    block_ids: Tensor,
    staging: Tensor,
    staging_rows: Tensor,
    *,
    layout: RecordLayout,
    gather: bool,
) -> None:
    """Part by part what `kvtier_kernels.copies.quantised_copy.quantised_copy` does."""
    if staging.dim() == 2:
        staging = staging.view(staging.size(0), len(parts), -1).transpose(0, 1)
    for part, records in zip(parts, staging, strict=True):
        if gather:
            records[staging_rows] = to_records(part[block_ids], layout)
        else:
            part[block_ids] = from_records(records[staging_rows], layout)
