"""Targets: segments of a disk tier, as a start finds them and as reads do.

An input is not the segment but what is done to one: edits, so that small inputs reach any place of it.

    input = flags, edits;  edit = what (u8), page (u8), offset (u16), length (u8), bytes
"""

import contextlib
import shutil
import struct
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from fuzz_mending import HEADER_BYTES, mended_block
from fuzz_segment_image import EXTENT, FOOTER, HEAD_BYTES, KEYS, NBYTES, PAGE, SEALS, image, mended_heads
from fuzz_target import MENDED, Execute, Target, flagged, payload_of
from kvtier.codec.stored_form import Codec
from kvtier.errors import ConfigError
from kvtier.identity.keys import StoreKey
from kvtier.metrics import Metrics
from kvtier.testing.blocks import make_key, read_blocks, summed
from kvtier.tiers.base import Status, WriteStatus
from kvtier.tiers.common.packer import BlockPacker
from kvtier.tiers.disk.log.buffers import Buffers
from kvtier.tiers.disk.log.format import NewerFormatError
from kvtier.tiers.disk.log.reading import BlockReader
from kvtier.tiers.disk.log.scan import Found, SegmentReader
from kvtier.tiers.disk.operations.read_path import ReadPath
from kvtier.tiers.disk.operations.recovery import adopt, decide
from kvtier.tiers.disk.state.log_state import LogState
from kvtier.tiers.disk.tier import DiskTier

_FORGED = 0x02
"""Besides what `MENDED` does, the checksums of payloads are made right: what is read then is whatever was forged."""
_UNSEALED = 0x04
_FORM = 0x18
_NUMBER = 7
_EDIT = struct.Struct("<BBHB")
_OVERWRITE, _XOR, _CUT, _COPY = range(4)
_MOST_PAGES = 64
_NEW = make_key("new")


def edit(what: int, page: int, offset: int, data: bytes = b"") -> bytes:
    return _EDIT.pack(what, page, offset, len(data)) + data


def _seeds() -> list[bytes]:
    """Each form, whole; and a few edits of what matters in it."""
    edits = [
        b"",
        edit(_XOR, 0, 40, b"\x01"),
        edit(_CUT, 5, 0),
        edit(_COPY, 6, 3),
        edit(_OVERWRITE, 1, 56, struct.pack("<I", 2)),
        edit(_XOR, 1, HEAD_BYTES + 6, b"\x01") + edit(_XOR, 3, 10, b"\x80"),
        edit(_OVERWRITE, 0, 0, bytes(48)),
    ]
    flags = [_UNSEALED * open_ | form << 3 | mended for open_ in (0, 1) for form in range(4) for mended in (0, 1, 3)]
    return [flagged(flag, what) for flag in flags for what in edits]


def _edited(data: bytes) -> bytes:
    """The segment after the edits, its checksums right where the flags say so."""
    flags, at = data[0], 1
    pages = bytearray(image(_NUMBER, (flags & _FORM) >> 3, is_sealed=not flags & _UNSEALED))
    while at + _EDIT.size <= len(data):
        what, page, offset, length = _EDIT.unpack_from(data, at)
        patch = data[at + _EDIT.size : at + _EDIT.size + length]
        at += _EDIT.size + length
        start = min(page % _MOST_PAGES * PAGE + offset % PAGE, len(pages))
        if what % 4 == _CUT:
            del pages[start:]
        elif what % 4 == _COPY:
            source = offset % max(1, len(pages) // PAGE) * PAGE
            pages[page % _MOST_PAGES * PAGE : (page % _MOST_PAGES + 1) * PAGE] = pages[source : source + PAGE]
        else:
            old = pages[start : start + len(patch)].ljust(len(patch), b"\0")
            pages[start : start + len(patch)] = bytes(
                a ^ b if what % 4 == _XOR else b for a, b in zip(old, patch, strict=True)
            )
    if flags & _FORGED:
        _forge(pages)
    return mended_heads(pages) if flags & (MENDED | _FORGED) else bytes(pages)


def _forge(pages: bytearray) -> None:
    """Makes the checksum of each entry right for what lies at the page that it names."""
    for head in range(0, len(pages) - HEAD_BYTES, PAGE):
        if pages[head : head + 8] not in (EXTENT, FOOTER):
            continue
        for at in range(head + HEAD_BYTES, min(head + PAGE, len(pages)) - HEADER_BYTES - 16, HEADER_BYTES + 16):
            (length,) = struct.unpack_from("<I", pages, at + 80)
            (page,) = struct.unpack_from("<I", pages, at + HEADER_BYTES + 8)
            stored = bytes(pages[page * PAGE : page * PAGE + length])
            if length and len(stored) == length:
                block = mended_block(
                    bytes(pages[at : at + HEADER_BYTES]) + stored, StoreKey(bytes(pages[at + 8 : at + 72]))
                )
                pages[at : at + HEADER_BYTES] = block[:HEADER_BYTES]


class _MemoryFiles:
    """`FileLayer` over one file in memory, for readers. One thread."""

    direct = False

    def __init__(self) -> None:
        self.content = b""

    def open(self, path: str, *, writable: bool = True) -> int:
        return 0

    def size(self, path: str) -> int:
        return len(self.content)

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        start = offset
        for buffer in buffers:
            part = self.content[offset : offset + len(buffer)]
            buffer[: len(part)] = part
            offset += len(part)
        return offset - start

    def close(self, fd: int) -> None:
        pass


@contextlib.contextmanager
def _segment() -> Iterator[Execute]:
    """A start's look at one segment, and a read of all keys that it finds; no folder, no threads."""
    files, buffers = _MemoryFiles(), Buffers(2)
    reader = SegmentReader(files, buffers)  # type: ignore[arg-type]
    packer = BlockPacker(Codec.RAW, tier="fuzz", metrics=Metrics(), seals=SEALS)
    blocks = BlockReader(lambda _, pieces, page: files.read(0, pieces, page * PAGE), buffers, packer, direct=False)

    def execute(data: bytes) -> None:
        if not data:
            return
        files.content = _edited(data)
        try:
            found = reader.inspect("a segment", _NUMBER)
        except NewerFormatError:
            return
        if not isinstance(found, Found) or not len(found.entries):
            return
        reader.verified("a segment", found.entries)
        reader.entries(0, found.segment, len(files.content) // PAGE)
        state = LogState()
        decide([adopt(found, state)], state)
        into = [memoryview(bytearray(NBYTES)) for _ in KEYS]
        finding = ReadPath(state, None, None, None, None, None)  # type: ignore[arg-type]
        for wanted in finding._find(KEYS, into, range(len(KEYS))):
            (answer,) = blocks.read([wanted])
            if answer.problem is None and not data[0] & _FORGED:
                assert into[wanted.index] == payload_of(NBYTES, wanted.index), "a wrong hit"

    yield execute


@contextlib.contextmanager
def _disk() -> Iterator[Execute]:
    """A whole tier: opened on the segment and a sound one, read, written to, opened again."""
    with tempfile.TemporaryDirectory(prefix="kvtier-fuzz-") as parent:

        def execute(data: bytes) -> None:
            if not data:
                return
            folder = Path(parent) / "disk"
            folder.mkdir()
            try:
                (folder / "kvtier-disk-tier").write_text("kvtier disk tier, format 2\n")
                (folder / f"{_NUMBER:08x}.segment").write_bytes(_edited(data))
                (folder / f"{_NUMBER + 2:08x}.segment").write_bytes(image(_NUMBER + 2, 0, is_sealed=True))
                _use(folder, is_forged=bool(data[0] & _FORGED))
            finally:
                shutil.rmtree(folder)

        yield execute


def _use(folder: Path, *, is_forged: bool) -> None:
    try:
        with _tier(folder) as tier:
            _compare(read_blocks(tier, KEYS, NBYTES), is_forged)
            written = tier.write([summed(_NEW, payload_of(NBYTES, "new"))])
            tier.discard([KEYS[0]])
            assert tier.lookup([KEYS[0]]) == [Status.MISS]
            tier.check()
        with _tier(folder) as tier:
            found = read_blocks(tier, [*KEYS, _NEW], NBYTES)
    except ConfigError as error:
        if "of another format" in str(error):  # the one reason to refuse a folder
            return
        raise
    assert found[0] is None, "what was discarded is back"
    _compare(found[:-1], is_forged)
    assert written == [WriteStatus.FAILED] or found[-1] == payload_of(NBYTES, "new"), "what was stored is gone"


def _compare(found: Sequence[bytes | None], is_forged: bool) -> None:
    for label, payload in enumerate(found):
        assert is_forged or payload in (None, payload_of(NBYTES, label)), "a wrong hit"


@contextlib.contextmanager
def _tier(folder: Path) -> Iterator[DiskTier]:
    tier = DiskTier.open(folder, 4 << 20, reserve_bytes=0, num_threads=1, seals=SEALS)
    try:
        yield tier
    finally:
        tier.close()


SEGMENT = Target(
    "segment",
    "segments of a disk, as a start reads them, and reads of what it found",
    _seeds,
    _segment,
    600,
    most_runs=40_000,
)
DISK = Target(
    "disk", "a disk tier opened on such a segment: read, written, discarded, opened again", _seeds, _disk, 600
)
