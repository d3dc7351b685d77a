"""What a page of KV is in a lossy codec's form: a record. Host code knows by it how many bytes there are, and where.

A page is one part of a block as `part_copy.Parts` has it, 16-bit elements: vectors of `head_dim` elements, one for each
key or value of a token and head, in the order of memory. Its record, little-endian:

| bytes | what |
| --- | --- |
| `num_vectors * head_dim` | the stored values, a byte each, in the order of the page |
| 0 to 15 | zeros, up to a multiple of 16 |
| `4 * num_vectors` | a float32 for each vector: its scale |
| 0 to 12 | zeros, up to a multiple of 16 |

A block's record is the records of its parts, one after the other. A value is its stored value times its vector's scale,
rounded to the page's dtype. The scale is the vector's largest magnitude divided by the largest that can be stored, both
by IEEE rules: all of float32, rounded to nearest, ties to even. Where that is 0, so are all stored values, and the
scale is 1. A vector with an infinity or a NaN in it has an infinite scale and stored zeros, and comes back as NaN.
"""

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16)
_ALIGNMENT = 16


class LossyCodec(StrEnum):
    """A lossy codec, as a namespace names it in `lossy_codec`. Records that would differ in a bit need another name."""

    INT8 = "int8_per_head"
    """-127 to 127, rounded to nearest, ties to even."""
    FP8 = "fp8_e4m3_per_head"
    """e4m3 without infinities, -448 to 448, rounded to nearest, ties to even."""

    @property
    def stored_dtype(self) -> torch.dtype:
        return torch.int8 if self is LossyCodec.INT8 else torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """The layout of one page and its record. Equal layouts mean equal records of equal pages."""

    codec: LossyCodec
    dtype: torch.dtype
    """The dtype of the page: bfloat16 or float16."""
    head_dim: int
    num_vectors: int
    """E.g. `2 * tokens_per_block * num_kv_heads` where a page has keys and values of a layer."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype}: needs bfloat16 or float16")
        if self.head_dim < 1 or self.num_vectors < 1:
            raise ValueError(f"{self.num_vectors} vectors of {self.head_dim} elements: needs at least 1 of 1")

    @property
    def page_bytes(self) -> int:
        return self.num_vectors * self.head_dim * self.dtype.itemsize

    @property
    def values_bytes(self) -> int:
        return self.num_vectors * self.head_dim

    @property
    def scales_start(self) -> int:
        """Bytes from the start of a record."""
        return _padded(self.values_bytes)

    @property
    def record_bytes(self) -> int:
        return self.scales_start + _padded(4 * self.num_vectors)

    def values(self, records: Tensor) -> Tensor:
        """A view: `[..., num_vectors, head_dim]` of the codec's dtype. `records`: uint8 `[..., record_bytes]`."""
        values = records[..., : self.values_bytes].view(self.codec.stored_dtype)
        return values.view(*records.shape[:-1], self.num_vectors, self.head_dim)

    def scales(self, records: Tensor) -> Tensor:
        """A view: float32 `[..., num_vectors]`. `records`: uint8 `[..., record_bytes]`, at multiples of 16 bytes."""
        end = self.scales_start + 4 * self.num_vectors
        return records[..., self.scales_start : end].view(torch.float32)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
