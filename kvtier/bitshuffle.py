"""Bitshuffle and lz4 together: what makes bf16 KV smaller without losing a bit.

lz4 alone gains nothing on KV: neighbouring values share no whole bytes. Their exponents share bits, so
the bits of each block of values are transposed first, all sign bits together, then all bits of the next
place, and so on; lz4 takes what repeats (Masui et al. 2015, "A compression scheme for radio data in
high performance computing"; C-Blosc 1.21 does both in one pass through the cache).

The packed form is one Blosc 1 chunk. Its 16 bytes of header say which block and element size it was
made with, so either may change without a new version of the stored form:

    offset  bytes  field (little endian)
         0      1  version of the chunk format, 2
         1      1  version of lz4's format, 1
         2      1  flags: bit 2 bitshuffle, bit 4 blocks whole, bits 5 to 7 compressor, 1 = lz4
         3      1  element size
         4      4  unpacked length
         8      4  block size
        12      4  packed length, this header included
        16         blocks

Both functions release the GIL and run in the calling thread, in any number of threads at once.
"""

import ctypes
import functools
import struct
from typing import Any

from kvtier.errors import CorruptBlockError

ELEMENT_BYTES = 2
"""For all payloads, which are bytes to us: of bf16 and fp16. float32 would want 4 and gains nothing by 2
(1.00, not 1.17 to 1); fp8 gains little either way (1.04)."""

_BLOCK_BYTES = 32 * 1024
"""Per byte of an element, as C-Blosc counts: 64 KiB are transposed at once. Its own choice, up to eight
times as much, packs worse."""
_EFFORT = 9
"""The most lz4 can do in one pass: a ratio of 1.26 instead of 1.21, at four fifths of the speed."""
_HEADER = struct.Struct("<4B3I")
_FORMAT_VERSION, _LZ4_VERSION = 2, 1
_BITSHUFFLE_AND_LZ4 = 0b001_00_1_00
_BLOCKS_WHOLE = 0b000_10_0_00
_MAX_BYTES = 2**31 - 1 - _HEADER.size

_Buffer = bytes | bytearray | memoryview


@functools.cache
def _library() -> Any:
    """C-Blosc, set up for callers with threads of their own. Its settings are those of the process.

    Imported by the first block that is packed or unpacked: who stores raw has no need of it.
    """
    import blosc

    blosc.set_releasegil(True)
    blosc.set_nthreads(1)
    blosc.set_blocksize(_BLOCK_BYTES)
    return blosc


def pack(payload: _Buffer) -> bytes | None:
    """A chunk that `unpack_into` turns back into `payload`; None for one that no chunk can hold (2 GiB).

    A chunk of what cannot be packed is 16 bytes longer than it. About 2 GB/s of bf16 KV.
    """
    if len(payload) > _MAX_BYTES:
        return None
    blosc = _library()
    chunk: bytes = blosc.compress(payload, ELEMENT_BYTES, _EFFORT, blosc.BITSHUFFLE, "lz4")
    return chunk


def unpack_into(chunk: _Buffer, into: memoryview) -> None:
    """Fills `into`, one-dimensional writable bytes, from a chunk of exactly that many bytes unpacked.

    Nothing outside of `into` is written and no more than two blocks are allocated, whatever the chunk
    says. Raises `CorruptBlockError` when it is not such a chunk; `into` holds anything then. About 4 GB/s
    of bf16 KV.
    """
    _require_chunk(chunk, len(into))
    blosc = _library()
    try:
        blosc.decompress_ptr(chunk, ctypes.addressof(ctypes.c_char.from_buffer(into)))
    except blosc.blosc_extension.error as error:
        raise CorruptBlockError(f"lz4: {error}") from error


def _require_chunk(chunk: _Buffer, nbytes: int) -> None:
    """The library believes the header's lengths, and takes other compressors too: so all of it is checked."""
    if len(chunk) < _HEADER.size:
        raise CorruptBlockError(f"lz4: chunk of {len(chunk)} bytes")
    version, lz4_version, flags, element_bytes, raw_length, block_bytes, length = _HEADER.unpack_from(chunk)
    if (version, lz4_version, flags & ~_BLOCKS_WHOLE) != (_FORMAT_VERSION, _LZ4_VERSION, _BITSHUFFLE_AND_LZ4):
        raise CorruptBlockError(f"lz4: foreign chunk {bytes(chunk[:4]).hex()}")
    if raw_length != nbytes or length != len(chunk):
        raise CorruptBlockError(
            f"lz4: chunk of {length} bytes for {raw_length}, where there are {len(chunk)} for {nbytes}"
        )
    if not element_bytes or not 0 < block_bytes <= nbytes:
        raise CorruptBlockError(f"lz4: blocks of {block_bytes} bytes, elements of {element_bytes}")
