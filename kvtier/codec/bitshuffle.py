"""Bitshuffle and lz4 together: what makes bf16 KV smaller without losing a bit.

lz4 alone gains nothing on KV: neighbouring values share no whole bytes. Their exponents share bits, so
the bits of each block of values are transposed first, all sign bits together, then all bits of the next
place, and so on; lz4 takes what repeats (Masui et al. 2015, "A compression scheme for radio data in
high performance computing"; C-Blosc 1.21 does both in one pass through the cache). The packed form is one
chunk of `kvtier.codec.blosc_chunk`.
"""

from kvtier.codec.blosc_chunk import Buffer, ChunkKind

ELEMENT_BYTES = 2
"""The size of an element for all payloads, which are bytes to us: that of bf16 and fp16. float32 would want 4 and gains
nothing by 2 (1.00, not 1.17 to 1); fp8 gains little either way (1.04)."""

_BLOCK_BYTES = 32 * 1024
"""Per byte of an element, as C-Blosc counts: 64 KiB are transposed at once. Its own choice, up to eight
times as much, packs worse."""
_EFFORT = 9
"""The most lz4 can do in one pass: a ratio of 1.26 instead of 1.21, at four fifths of the speed."""
_KIND = ChunkKind("lz4", _EFFORT, ELEMENT_BYTES, _BLOCK_BYTES, bitshuffled=True)


def pack(payload: Buffer) -> bytes | None:
    """Packs a payload into a chunk that `unpack_into` turns back into it; None for one that no chunk can hold (2 GiB).
    It packs about 2 GB/s of bf16 KV."""
    return _KIND.pack(payload)


def unpack_into(chunk: Buffer, into: memoryview) -> None:
    """Fills `into`, one-dimensional writable bytes, from a chunk of exactly that many bytes unpacked, at about 4 GB/s
    of bf16 KV. Raises `CorruptBlockError` when it is not such a chunk; `into` holds anything then."""
    _KIND.unpack_into(chunk, into)
