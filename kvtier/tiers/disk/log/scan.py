"""What a segment holds, found out from its file: by its footer, or extent by extent when it has none."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvtier.codec.stored_form import parse_stored_header, verify
from kvtier.errors import CorruptBlockError
from kvtier.tiers.disk.log.buffers import Buffers
from kvtier.tiers.disk.log.format import (
    NO_ENTRIES,
    PAGE,
    Entries,
    Head,
    Kind,
    SegmentId,
    find_extent_heads,
    has_magic,
    head_pages,
    header_bytes,
    may_be_ours,
    pages_of,
    parse_extent_head,
    parse_footer,
    parse_header,
    parse_trailer,
    read_entries,
)
from kvtier.tiers.disk.medium.files import FileLayer
from kvtier.tiers.disk.medium.health import NOT_ALLOWED_ERRNOS, is_passing

_WINDOW_PAGES = 256
"""Pages that are looked at together where an extent's head should be and is not."""
_MOST_FAILED = 32
"""The most reads of one file that may fail: a drive may try for seconds before it says that it cannot."""


@dataclass(frozen=True, slots=True)
class Found:
    """What is in a segment."""

    segment: SegmentId
    entries: Entries
    sealed: bool
    """The segment has a footer, which lists `entries`. Else `entries` are records whose payloads were verified, and
    tombstones."""
    end_page: int
    """The page behind the last sound extent, whose end may be missing, or behind the whole file when it is sealed."""
    file_pages: int
    num_torn: int = 0
    """Records whose payloads are not what their heads say: in a segment without a footer."""
    lost_pages: int = 0
    """Pages before `end_page` that belong to no sound extent."""


@dataclass(frozen=True, slots=True)
class Damaged:
    """A segment file of ours of which nothing can be said."""

    reason: str
    empty: bool
    """Nothing was ever written to it: made just before its process ended."""


@dataclass(frozen=True, slots=True)
class Foreign:
    """A file with the name of a segment that we did not make."""


class SegmentReader:
    """Reads whole segments. Any thread; `OSError` where nothing can be said, `NewerFormatError` from headers."""

    def __init__(self, files: FileLayer, buffers: Buffers) -> None:
        self._files = files
        self._buffers = buffers

    def inspect(self, path: str, number: int, *, writable: bool = True) -> Found | Damaged | Foreign:
        """Everything about the file called `number`. A segment without a footer is read whole."""
        nbytes = self._files.size(path)
        if not nbytes:
            return Damaged("it is empty", empty=True)
        with self._open(path, writable) as fd:
            return self._look(_Pages(self._files, self._buffers, fd, pages_of(nbytes)), number, nbytes // PAGE)

    def entries(self, fd: int, segment: SegmentId, num_pages: int) -> Entries | None:
        """All that a sealed segment has: by its footer, or as a scan finds it; None when it is another's file."""
        pages = _Pages(self._files, self._buffers, fd, num_pages)
        footer = pages.footer(num_pages)
        if footer is not None and footer[0] == segment:
            return footer[1]
        found = pages.scan(segment)
        return found.entries if len(found.entries) else None

    def verified(self, path: str, entries: Entries) -> Entries:
        """The entries among `entries`, all of one segment, whose payloads are what was stored."""
        with self._open(path, False) as fd:
            return _Pages(self._files, self._buffers, fd, 0).verified(entries)

    @staticmethod
    def _look(pages: "_Pages", number: int, num_pages: int) -> Found | Damaged | Foreign:
        """:param num_pages: whole ones: a footer is at the end of the last."""
        segment, ours, empty = pages.header()
        footer = pages.footer(num_pages) if num_pages > 1 else None
        if footer is not None and footer[0] == (segment or footer[0]) and footer[0].number == number:
            return Found(footer[0], footer[1], True, num_pages, num_pages)
        if segment is not None:
            if segment.number != number:
                return Damaged(f"is segment {segment.number}", empty=False)
            found = pages.scan(segment)
            if len(found.entries) or pages.problem is None:
                return found
        elif empty:  # its header was lost, or never written
            ours, empty = pages.begins_like_ours()
        if pages.problem is not None:
            return Damaged(f"it cannot be read: {pages.problem}", empty=False)
        return Damaged("neither a sound header nor a footer", empty) if ours or empty else Foreign()

    @contextlib.contextmanager
    def _open(self, path: str, writable: bool) -> Iterator[int]:
        fd = self._files.open(path, writable=writable)
        try:
            yield fd
        finally:
            self._files.close(fd)


class _Pages:
    """One file, page by page. One thread. A page that cannot be read, twice, is one without content, and counted.

    `OSError` when that has happened too often, or for what has nothing to do with the file.
    """

    def __init__(self, files: FileLayer, buffers: Buffers, fd: int, num_pages: int) -> None:
        self._files, self._buffers, self._fd, self._num_pages = files, buffers, fd, num_pages
        self._num_failed = 0
        self.problem: OSError | None = None
        """Why a page could not be read, the last time."""

    def header(self) -> tuple[SegmentId | None, bool, bool]:
        """The segment that the file says it is; without that, whether it begins like ours, and whether its first page
        is all zeros."""
        with self._buffers.lend(PAGE) as page:
            if not self._has(page, 0):
                return None, True, False
            return parse_header(page), may_be_ours(page), not np.frombuffer(page, np.uint8).any()

    def footer(self, num_pages: int) -> tuple[SegmentId, Entries] | None:
        """What stands at the end of these pages; read again if it is not sound, as a scan may miss what it says."""
        return self._footer(num_pages) or self._footer(num_pages)

    def begins_like_ours(self) -> tuple[bool, bool]:
        """Whether any page begins like an extent or footer; whether all are zeros."""
        empty = True
        for first in range(0, self._num_pages, _WINDOW_PAGES):
            with self._buffers.lend(min(_WINDOW_PAGES, self._num_pages - first) * PAGE) as window:
                if not self._has(window, first) or has_magic(window):
                    return True, False
                empty &= not np.frombuffer(window, np.uint8).any()
        return False, empty

    def scan(self, segment: SegmentId) -> Found:
        """Extent after extent. Where none begins, the next one is looked for: a torn write may lie before it."""
        good: list[Entries] = []
        page = end = 1
        num_torn = used_pages = 0
        while page < self._num_pages:
            head = self._head(segment, page)
            entries = self._sound_entries(head) if head is not None else None
            if head is None or entries is None:
                page = self._next_head(segment, page + 1)
                continue
            whole = self.verified(entries)
            num_torn += len(entries) - len(whole)
            if len(whole):
                good.append(whole)
                end = page + head.num_pages
                used_pages += head.num_pages
            page += head.num_pages
        entries = np.concatenate(good) if good else NO_ENTRIES
        return Found(segment, entries, False, end, self._num_pages, num_torn, end - 1 - used_pages)

    def verified(self, entries: Entries) -> Entries:
        """Tombstones, and the records whose payloads are what was stored."""
        whole = [kind != Kind.RECORD or self._is_whole(entries, i) for i, kind in enumerate(entries["kind"])]
        good: Entries = entries[np.array(whole, bool)]
        return good

    def _footer(self, num_pages: int) -> tuple[SegmentId, Entries] | None:
        with self._buffers.lend(PAGE) as page:
            place = parse_trailer(page) if self._has(page, num_pages - 1) else None
        if place is None or not 1 <= place[0] < num_pages:
            return None
        with self._buffers.lend((num_pages - place[0]) * PAGE) as footer:
            return parse_footer(footer, place[0]) if self._has(footer, place[0]) else None

    def _head(self, segment: SegmentId, page: int) -> Head | None:
        with self._buffers.lend(PAGE) as buffer:
            head = parse_extent_head(buffer) if self._has(buffer, page) else None
        if head is None or head.segment != segment or head.page != page:
            return None
        fits = head_pages(head.num_entries) <= min(head.num_pages, self._num_pages - page)  # payloads may be cut off
        return head if fits and head.num_entries else None

    def _sound_entries(self, head: Head) -> Entries | None:
        """The entries, if they are sound and stay inside their extent."""
        first = head.page + head_pages(head.num_entries)
        with self._buffers.lend((first - head.page) * PAGE) as buffer:
            end_page = head.page + head.num_pages
            entries = read_entries(buffer, head, end_page) if self._has(buffer, head.page) else None
        if entries is None or (entries["page"] < first)[entries["kind"] == Kind.RECORD].any():
            return None
        return entries

    def _next_head(self, segment: SegmentId, page: int) -> int:
        count = _WINDOW_PAGES
        while page < self._num_pages:
            count = min(count, self._num_pages - page)
            with self._buffers.lend(count * PAGE) as window:
                if not self._has(window, page) and count > 1:
                    count = 1  # page by page over the bad region
                    continue
                found = find_extent_heads(window, segment)
            if found:
                return page + found[0]
            page += count
            count = _WINDOW_PAGES if page % _WINDOW_PAGES == 0 else count
        return self._num_pages

    def _is_whole(self, entries: Entries, index: int) -> bool:
        header = parse_stored_header(header_bytes(entries, index))
        nbytes = header.stored_length
        with self._buffers.lend(nbytes) as buffer:
            if not self._has(buffer[: pages_of(nbytes) * PAGE], int(entries["page"][index])):
                return False
            try:
                verify(header, header.key, buffer[:nbytes])
            except CorruptBlockError:
                return False
        return True

    def _has(self, buffer: memoryview, page: int) -> bool:
        """Reads whole pages; what the file does not have is zeros. False, and zeros, when they cannot be read."""
        for _ in range(2):
            try:
                done = self._files.read(self._fd, [buffer], page * PAGE) if len(buffer) else 0
            except OSError as error:
                if is_passing(error) or error.errno in NOT_ALLOWED_ERRNOS:
                    raise
                self.problem = error
                continue
            if done < len(buffer):
                buffer[done:] = bytes(len(buffer) - done)
            return True
        self._num_failed += 1
        if self._num_failed > _MOST_FAILED and self.problem is not None:
            raise self.problem
        buffer[:] = bytes(len(buffer))
        return False
