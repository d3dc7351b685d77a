"""Reading records: neighbours in one read, straight into the callers' buffers where the file system allows it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvtier.codec.stored_form import Codec, Header
from kvtier.errors import CorruptBlockError
from kvtier.tiers.common.packer import BlockPacker
from kvtier.tiers.disk.log.buffers import Buffers, is_aligned
from kvtier.tiers.disk.log.format import PAGE, pages_of

_RUN_BYTES = 4 << 20
"""Read at once: enough for full speed, few enough for several threads."""
_RUN_BLOCKS = 256

ReadPages = Callable[[int, Sequence[memoryview], int], int]
"""Segment number, pieces, first page; see `FileLayer.read`."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """One block to read."""

    index: int
    """The block's place in the caller's batch."""
    segment: int
    page: int
    header: Header
    """The header that the index has, under the key that was asked for: whatever lies there instead does not match its
    checksum."""
    into: memoryview

    @property
    def num_pages(self) -> int:
        return pages_of(self.header.stored_length)


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one block."""

    wanted: Wanted
    problem: OSError | CorruptBlockError | None
    """None: every byte is there and verified."""


def runs_of(blocks: Iterable[Wanted]) -> Iterator[list[Wanted]]:
    """Blocks that lie side by side, in runs that are read at once."""
    run: list[Wanted] = []
    nbytes = 0
    for block in sorted(blocks, key=lambda block: (block.segment, block.page)):
        last = run[-1] if run else None
        if last is not None and (
            block.segment != last.segment
            or block.page != last.page + last.num_pages
            or len(run) == _RUN_BLOCKS
            or nbytes + block.header.stored_length > _RUN_BYTES
        ):
            yield run
            run, nbytes = [], 0
        run.append(block)
        nbytes += block.header.stored_length
    if run:
        yield run


class BlockReader:
    """Reads runs, and verifies them. Any thread."""

    def __init__(self, read_pages: ReadPages, buffers: Buffers, packer: BlockPacker, *, direct: bool) -> None:
        """:param direct: buffers must be page-aligned; those that are not are filled from one that is."""
        self._read_pages = read_pages
        self._packer = packer
        self._buffers = buffers
        self._direct = direct

    def read(self, run: list[Wanted]) -> list[Answer]:
        """An answer per block, in order. Where the medium fails for several blocks, each is tried by itself."""
        try:
            return self._read(run)
        except OSError as error:
            if len(run) == 1:
                return [Answer(run[0], error)]
        return [answer for block in run for answer in self.read([block])]

    def _read(self, run: list[Wanted]) -> list[Answer]:
        straight = [self._fits_straight(block) for block in run]
        staged = sum(block.num_pages for block, fits in zip(run, straight, strict=True) if not fits)
        with self._buffers.lend((staged + 1) * PAGE) as stage:
            padding, at = stage[:PAGE], PAGE
            pieces: list[memoryview] = []
            places: list[memoryview] = []
            for block, fits in zip(run, straight, strict=True):
                nbytes = block.header.stored_length
                if fits:
                    places.append(block.into)
                    pieces += [block.into] if nbytes else []
                    pieces += [padding[: -nbytes % PAGE]] if nbytes % PAGE else []
                else:
                    pages = stage[at : at + block.num_pages * PAGE]
                    at += len(pages)
                    places.append(pages[:nbytes])
                    pieces.append(pages)
            num_read = self._read_pages(run[0].segment, pieces, run[0].page) if pieces else 0
            return [
                self._checked(block, place, run[0].page, num_read) for block, place in zip(run, places, strict=True)
            ]

    def _fits_straight(self, block: Wanted) -> bool:
        if block.header.codec is not Codec.RAW or block.header.key_id:
            return False
        return not self._direct or is_aligned(block.into)

    def _checked(self, block: Wanted, place: memoryview, first_page: int, num_read: int) -> Answer:
        end = (block.page - first_page) * PAGE + block.header.stored_length
        try:
            if num_read < end:
                raise CorruptBlockError(f"the file ends {end - num_read:,} bytes early")
            self._packer.decode_into(block.header, block.header.key, place, block.into)
        except CorruptBlockError as error:
            return Answer(block, error)
        return Answer(block, None)
