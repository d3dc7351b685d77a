"""Chunks of C-Blosc 1: what lossless codecs are made of.

A chunk says itself how it was made, so block and element size may change without a new version of the stored form:

    offset  bytes  field (little endian)
         0      1  version of the chunk format, 2
         1      1  version of the compressor's format, 1
         2      1  flags: bit 0 byte shuffle, bit 1 a plain copy, bit 2 bitshuffle, bit 4 blocks whole,
                   bits 5 to 7 compressor: 1 = lz4, 4 = zstd
         3      1  element size
         4      4  unpacked length
         8      4  block size
        12      4  packed length, this header included
        16         blocks

The library believes all of it and knows more kinds than we take, so all of it is checked before the library sees it.
"""

import ctypes
import functools
import struct
from dataclasses import dataclass
from typing import Any, Literal

from kvtier.errors import CorruptBlockError

Buffer = bytes | bytearray | memoryview
"""One-dimensional bytes."""

_HEADER = struct.Struct("<4B3I")
_FORMAT_VERSION, _COMPRESSOR_VERSION = 2, 1
_BLOCKS_WHOLE = 0b000_10_0_00
_MAX_BYTES = 2**31 - 1 - _HEADER.size
_COMPRESSORS = {"lz4": 1, "zstd": 4}


@functools.cache
def _library() -> Any:
    """C-Blosc, set up for callers with threads of their own.

    Imported by the first block that is packed or unpacked: who stores raw has no need of it.
    """
    import blosc

    blosc.set_releasegil(True)
    blosc.set_nthreads(1)
    return blosc


@dataclass(frozen=True, slots=True)
class ChunkKind:
    """One way to make chunks. Its methods release the GIL and run in the calling thread, in any number at once."""

    compressor: Literal["lz4", "zstd"]
    effort: int
    """C-Blosc's level, 1 to 9."""
    element_bytes: int
    block_bytes: int
    """What C-Blosc is told to pack at once; it multiplies by the element size up to a size of its own."""
    bitshuffled: bool

    def pack(self, payload: Buffer) -> bytes | None:
        """A chunk that `unpack_into` turns back into `payload`; None for one that no chunk can hold (2 GiB).

        A chunk of what cannot be packed is 16 bytes longer than it, and none that `unpack_into` takes.
        """
        if len(payload) > _MAX_BYTES:
            return None
        blosc = _library()
        # The setting is the process's. Should a thread come between, blocks are of its size: they read as well.
        blosc.set_blocksize(self.block_bytes)
        shuffle = blosc.BITSHUFFLE if self.bitshuffled else blosc.NOSHUFFLE
        chunk: bytes = blosc.compress(payload, self.element_bytes, self.effort, shuffle, self.compressor)
        return chunk

    def unpack_into(self, chunk: Buffer, into: memoryview) -> None:
        """Fills `into`, one-dimensional writable bytes, from a chunk of exactly that many bytes unpacked.

        Nothing outside of `into` is written and no more than two blocks, none of them larger than `into`, are
        allocated, whatever the chunk says. Raises `CorruptBlockError` when it is not such a chunk; `into` holds
        anything then.
        """
        self._require(chunk, len(into))
        blosc = _library()
        try:
            blosc.decompress_ptr(chunk, ctypes.addressof(ctypes.c_char.from_buffer(into)))
        except blosc.blosc_extension.error as error:
            raise CorruptBlockError(f"{self.compressor}: {error}") from error

    def _require(self, chunk: Buffer, nbytes: int) -> None:
        name = self.compressor
        if len(chunk) < _HEADER.size:
            raise CorruptBlockError(f"{name}: chunk of {len(chunk)} bytes")
        version, of_compressor, flags, element_bytes, raw_length, block_bytes, length = _HEADER.unpack_from(chunk)
        expected = _COMPRESSORS[name] << 5 | self.bitshuffled << 2
        if (version, of_compressor, flags & ~_BLOCKS_WHOLE) != (_FORMAT_VERSION, _COMPRESSOR_VERSION, expected):
            raise CorruptBlockError(f"{name}: foreign chunk {bytes(chunk[:4]).hex()}")
        if raw_length != nbytes or length != len(chunk):
            raise CorruptBlockError(
                f"{name}: chunk of {length} bytes for {raw_length}, where there are {len(chunk)} for {nbytes}"
            )
        if not element_bytes or not 0 < block_bytes <= nbytes:
            raise CorruptBlockError(f"{name}: blocks of {block_bytes} bytes, elements of {element_bytes}")
