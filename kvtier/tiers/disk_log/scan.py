"""What a segment holds, found out from its file: by its footer, or extent by extent when it has none."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvtier.codec import parse_stored_header, verify
from kvtier.errors import CorruptBlockError
from kvtier.tiers.disk_log.buffers import Buffers
from kvtier.tiers.disk_log.format import (
    NO_ENTRIES,
    PAGE,
    Entries,
    Head,
    Kind,
    SegmentId,
    find_extent_heads,
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
from kvtier.tiers.files import FileLayer

_WINDOW_PAGES = 256
"""Looked at together where an extent's head should be and is not."""


@dataclass(frozen=True, slots=True)
class Found:
    """What is in a segment."""

    segment: SegmentId
    entries: Entries
    sealed: bool
    """By a footer; else `entries` are records whose payloads were verified, and tombstones."""
    end_page: int
    """Behind the last sound extent, whose end may be missing, or the whole file when sealed."""
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
    """Reads whole segments. Any thread; `OSError` from the file layer, `NewerFormatError` from headers."""

    def __init__(self, files: FileLayer, buffers: Buffers) -> None:
        self._files = files
        self._buffers = buffers

    def inspect(self, path: str, number: int, *, writable: bool = True) -> Found | Damaged | Foreign:
        """Everything about the file called `number`. A segment without a footer is read whole."""
        nbytes = os.stat(path, follow_symlinks=False).st_size
        if nbytes < PAGE:
            return Damaged("no header page", empty=True)
        with self._open(path, writable) as fd:
            return self._look(fd, number, nbytes // PAGE)

    def entries(self, fd: int, segment: SegmentId, num_pages: int) -> Entries | None:
        """What the footer says; None when there is none of this segment."""
        footer = self._footer(fd, num_pages)
        return footer[1] if footer is not None and footer[0] == segment else None

    def _look(self, fd: int, number: int, num_pages: int) -> Found | Damaged | Foreign:
        with self._buffers.lend(PAGE) as page:
            self._read(fd, page, 0)
            segment, ours, empty = parse_header(page), may_be_ours(page), not np.frombuffer(page, np.uint8).any()
        footer = self._footer(fd, num_pages)
        if footer is not None and footer[0] == (segment or footer[0]) and footer[0].number == number:
            return Found(footer[0], footer[1], True, num_pages, num_pages)
        if segment is None:
            return Damaged("neither a sound header nor a footer", empty) if ours else Foreign()
        if segment.number != number:
            return Damaged(f"is segment {segment.number}", empty=False)
        return self._scan(fd, segment, num_pages)

    def _footer(self, fd: int, num_pages: int) -> tuple[SegmentId, Entries] | None:
        with self._buffers.lend(PAGE) as page:
            self._read(fd, page, num_pages - 1)
            place = parse_trailer(page)
        if place is None or not 1 <= place[0] < num_pages:
            return None
        with self._buffers.lend((num_pages - place[0]) * PAGE) as footer:
            self._read(fd, footer, place[0])
            return parse_footer(footer, place[0])

    def _scan(self, fd: int, segment: SegmentId, num_pages: int) -> Found:
        """Extent after extent. Where none begins, the next one is looked for: a torn write may lie before it."""
        good: list[Entries] = []
        page = end = 1
        num_torn = used_pages = 0
        while page < num_pages:
            head = self._head(fd, segment, page, num_pages)
            entries = self._sound_entries(fd, head, num_pages) if head is not None else None
            if head is None or entries is None:
                page = self._next_head(fd, segment, page + 1, num_pages)
                continue
            whole = self._verified(fd, entries)
            num_torn += len(entries) - len(whole)
            if len(whole):
                good.append(whole)
                end = page + head.num_pages
                used_pages += head.num_pages
            page += head.num_pages
        entries = np.concatenate(good) if good else NO_ENTRIES
        return Found(segment, entries, False, end, num_pages, num_torn, end - 1 - used_pages)

    def _head(self, fd: int, segment: SegmentId, page: int, num_pages: int) -> Head | None:
        with self._buffers.lend(PAGE) as buffer:
            self._read(fd, buffer, page)
            head = parse_extent_head(buffer)
        if head is None or head.segment != segment or head.page != page:
            return None
        fits = head_pages(head.num_entries) <= min(head.num_pages, num_pages - page)  # payloads may be cut off
        return head if fits and head.num_entries else None

    def _sound_entries(self, fd: int, head: Head, num_pages: int) -> Entries | None:
        """The entries, if they are sound and stay inside their extent."""
        first = head.page + head_pages(head.num_entries)
        with self._buffers.lend((first - head.page) * PAGE) as buffer:
            self._read(fd, buffer, head.page)
            entries = read_entries(buffer, head, head.page + head.num_pages)
        if entries is None or (entries["page"] < first)[entries["kind"] == Kind.RECORD].any():
            return None
        return entries

    def _next_head(self, fd: int, segment: SegmentId, page: int, num_pages: int) -> int:
        while page < num_pages:
            count = min(_WINDOW_PAGES, num_pages - page)
            with self._buffers.lend(count * PAGE) as window:
                self._read(fd, window, page)
                found = find_extent_heads(window, segment)
            if found:
                return page + found[0]
            page += count
        return num_pages

    def _verified(self, fd: int, entries: Entries) -> Entries:
        """Tombstones, and the records whose payloads are what was stored."""
        whole = [kind != Kind.RECORD or self._is_whole(fd, entries, i) for i, kind in enumerate(entries["kind"])]
        good: Entries = entries[np.array(whole, bool)]
        return good

    def _is_whole(self, fd: int, entries: Entries, index: int) -> bool:
        header = parse_stored_header(header_bytes(entries, index))
        nbytes = header.stored_length
        with self._buffers.lend(nbytes) as buffer:
            self._read(fd, buffer[: pages_of(nbytes) * PAGE], int(entries["page"][index]))
            try:
                verify(header, header.key, buffer[:nbytes])
            except CorruptBlockError:
                return False
        return True

    def verified(self, path: str, entries: Entries) -> Entries:
        """Of some entries of a segment, those whose payloads are what was stored."""
        with self._open(path, False) as fd:
            return self._verified(fd, entries)

    def _read(self, fd: int, buffer: memoryview, page: int) -> None:
        """Whole pages; what the file does not have is zeros."""
        done = self._files.read(fd, [buffer], page * PAGE) if len(buffer) else 0
        if done < len(buffer):
            buffer[done:] = bytes(len(buffer) - done)

    @contextlib.contextmanager
    def _open(self, path: str, writable: bool) -> Iterator[int]:
        fd = self._files.open(path, writable=writable)
        try:
            yield fd
        finally:
            self._files.close(fd)
