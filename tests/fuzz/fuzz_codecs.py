"""Targets: chunks of the codecs, and blocks in their stored form, sealed or not."""

import contextlib
import struct
from collections.abc import Callable, Iterator

import numpy as np

from codec_rig import build_v1
from fuzz_memory import GuardedMemory
from fuzz_mending import mended_block
from fuzz_target import KEY, MENDED, Execute, Target, flagged, payload_of
from kvtier.codec import bitshuffle, planes
from kvtier.codec.checksums import checksum
from kvtier.codec.sealed_form import StorageSeal, StorageSeals, seal
from kvtier.codec.stored_form import HEADER_BYTES, HEADER_DTYPE, Codec, Header, encode, parse_stored_header, well_formed
from kvtier.errors import CorruptBlockError
from kvtier.metrics import Metrics
from kvtier.tiers.common.packer import BlockPacker
from seal_rig import RED, storage_keys

_PLANES, _SIZE = 0x02, 0x0C
_CHUNK_SIZES = (512, 3000, 8000, 140_000)
_SIZES = (600, 3000)
_MOST_BYTES = 256 << 10


def _chunk_seeds() -> list[bytes]:
    seeds = []
    for place, size in enumerate(_CHUNK_SIZES):
        payload = (payload_of(min(size, 1000)) * size)[:size]  # chunks of several blocks stay small
        for kind, packed in ((0, bitshuffle.pack(payload)), (_PLANES, planes.pack(payload))):
            assert packed is not None
            for flags in (kind, kind | MENDED):
                seeds.append(flagged(flags | place << 2, bytes(packed)))
    return [seed for seed in seeds if len(seed) < CHUNKS.max_bytes]


@contextlib.contextmanager
def _chunks() -> Iterator[Execute]:
    """Packed bytes and target both end before a page that nobody may touch."""
    packed_memory, memory = GuardedMemory(_MOST_BYTES), GuardedMemory(_MOST_BYTES)

    def execute(data: bytes) -> None:
        if not data:
            return
        nbytes = _CHUNK_SIZES[(data[0] & _SIZE) >> 2]
        is_planes = bool(data[0] & _PLANES)
        unpack: Callable[[memoryview, memoryview], None] = planes.unpack_into if is_planes else bitshuffle.unpack_into
        body = _mended_chunk(data[1:], nbytes, is_planes) if data[0] & MENDED else data[1:]
        with contextlib.suppress(CorruptBlockError):
            unpack(packed_memory.holding(body), memory.lend(nbytes))
        packed_memory.check()
        memory.check()

    yield execute


def _mended_chunk(body: bytes, nbytes: int, is_planes: bool) -> bytes:
    """With what a chunk's first bytes must say; block and element size stay as they are."""
    chunk = bytearray(body.ljust(16, b"\0"))
    length = len(chunk) - (nbytes // 2 if is_planes else 0)
    chunk[:3] = b"\x02\x01" + bytes([(0x80 if is_planes else 0x24) | chunk[2] & 0x10])
    if length > 0:
        struct.pack_into("<I", chunk, 4, nbytes // 2 if is_planes else nbytes)
        struct.pack_into("<I", chunk, 12, length)
    return bytes(chunk)


_KEYS = storage_keys(1, 2)
_HAS_KEYS, _READS_PLAIN = 0x02, 0x04


def _stored_seeds() -> list[bytes]:
    blocks = []
    for size in _SIZES:
        payload = payload_of(size)
        summed = checksum(KEY, payload)
        for codec in Codec:
            blocks += [encode(KEY, payload, summed, codec), build_v1(KEY, payload, codec)]
            blocks.append(seal(KEY, payload, summed, codec, _KEYS))
    return [flagged(flags, head + bytes(stored)) for flags in range(8) for head, stored in blocks]


@contextlib.contextmanager
def _stored() -> Iterator[Execute]:
    """Whatever comes out of a block of `KEY` is its payload; a raw block whose checksum was forged excepted."""
    known = {payload_of(size) for size in _SIZES}
    packers = {
        flags: BlockPacker(
            Codec.RAW,
            tier="fuzz",
            metrics=Metrics(),
            seals=StorageSeals({RED: StorageSeal(_KEYS, bool(flags & _READS_PLAIN))} if flags & _HAS_KEYS else {}),
        )
        for flags in (0, _HAS_KEYS, _READS_PLAIN, _HAS_KEYS | _READS_PLAIN)
    }
    stored_memory, memory = GuardedMemory(_MOST_BYTES), GuardedMemory(_MOST_BYTES)

    def execute(data: bytes) -> None:
        if not data:
            return
        block = mended_block(data[1:], KEY) if data[0] & MENDED else data[1:]
        header = _parsed(block)
        if header is None or header.raw_length > _MOST_BYTES:
            return
        stored, into = stored_memory.holding(block[HEADER_BYTES:]), memory.lend(header.raw_length)
        try:
            packers[data[0] & (_HAS_KEYS | _READS_PLAIN)].decode_into(header, KEY, stored, into)
        except CorruptBlockError:
            return
        finally:
            stored_memory.check()
            memory.check()
        may_be_forged = data[0] & MENDED and not header.key_id and (header.codec is Codec.RAW or header.version == 1)
        assert may_be_forged or bytes(into) in known, "a wrong hit"

    yield execute


def _parsed(block: bytes) -> Header | None:
    """The header; None for what is none, in which both ways to look at headers agree."""
    try:
        header = parse_stored_header(block)
    except CorruptBlockError:
        header = None
    if len(block) >= HEADER_BYTES:
        is_well_formed = bool(well_formed(np.frombuffer(block, HEADER_DTYPE, 1))[0])
        fits_disk = header is not None and max(header.raw_length, header.stored_length) < 2**32
        assert is_well_formed == fits_disk, "parse_stored_header and well_formed do not agree"
    return header


CHUNKS = Target("chunks", "chunks of C-Blosc and planes, as the codecs unpack them", _chunk_seeds, _chunks)
STORED = Target(
    "stored",
    "stored forms of blocks, versions 1 and 2, all codecs, sealed or not",
    _stored_seeds,
    _stored,
    most_runs=250_000,
)
