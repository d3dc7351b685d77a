"""The files of segments: made, written extent by extent, sealed, synced, removed."""

import enum
from collections.abc import Sequence
from functools import partial

from kvtier.memory.buffers import ReadableBuffer
from kvtier.memory.pages import copy_bytes
from kvtier.tiers.disk.log.buffers import Buffers, fill_pages, is_aligned
from kvtier.tiers.disk.log.format import (
    PAGE,
    Entries,
    Kind,
    footer_pages,
    head_pages,
    make_entries,
    pack_extent_head,
    pack_footer,
    pack_header,
    pages_of,
)
from kvtier.tiers.disk.log.scan import SegmentReader
from kvtier.tiers.disk.log.segments import Extent, Segment, concatenated
from kvtier.tiers.disk.medium.descriptors import Descriptors
from kvtier.tiers.disk.medium.files import FileLayer
from kvtier.tiers.disk.medium.folder import DiskFolder
from kvtier.tiers.disk.medium.health import MediumHealth
from kvtier.tiers.disk.medium.io_threads import IoThreads
from kvtier.tiers.disk.state.log_state import LogState

Stamp = tuple[int, Kind]
"""Epoch and kind of an entry."""


class SyncPolicy(enum.Enum):
    """What outlives a loss of power. `docs/disk-format.md` says what each of them may forget."""

    NONE = "none"
    SEALED = "sealed"
    """Segments in the background once they are sealed, tombstones before they are acknowledged."""
    BATCH = "batch"
    """Everything before it is acknowledged."""


class SegmentFiles:
    """I/O on whole segments, without a lock. Any thread; methods raise `OSError` unless they say otherwise."""

    def __init__(
        self,
        folder: DiskFolder,
        files: FileLayer,
        state: LogState,
        buffers: Buffers,
        health: MediumHealth,
        sync: SyncPolicy,
    ) -> None:
        self._folder = folder
        self._files = files
        self._state = state
        self._buffers = buffers
        self._health = health
        self._sync = sync
        self._syncer = IoThreads(1, "kvtier-disk-sync")
        self.descriptors = Descriptors(files)
        self.reader = SegmentReader(files, buffers)

    def path(self, segment: Segment) -> str:
        return self._folder.segment_path(segment.number)

    def require_owned(self) -> None:
        """Raises `FolderLostError` for a folder that is not this process's any more: of what is made there no start
        would know, or another process."""
        self._folder.require_owned(self._files)

    def free_bytes(self) -> int:
        """What others leave on the file system."""
        return self._files.free_bytes(self._folder.path)

    def make(self, segment: Segment, epoch: int) -> None:
        """A file with its header. After an error there is none, or its space is counted."""
        fd = self._create(segment)
        try:
            with self._buffers.lend(PAGE) as page:
                copy_bytes(page, pack_header(segment.id, epoch))
                self._files.write(fd, [page], 0)
            if self._sync is not SyncPolicy.NONE:
                self._files.sync_folder(self._folder.path)
        except OSError:
            self._files.close(fd)
            self.drop(segment.number)
            raise
        self.descriptors.add(segment.number, fd)

    def write(
        self,
        extent: Extent,
        headers: Sequence[bytes],
        payloads: Sequence[ReadableBuffer],
        stamps: Sequence[Stamp],
        *,
        sync_forgets: bool = True,
    ) -> Entries:
        """One extent in one write: head, then payloads. The entries as they stand there.

        :param sync_forgets: tombstones are synced, unless the policy is to sync nothing.
        """
        page, pages = extent.payload_page, []
        for payload in payloads:
            pages.append(page)
            page += pages_of(len(payload))
        kinds = [kind for _, kind in stamps]
        entries = make_entries(headers, [epoch for epoch, _ in stamps], pages, kinds)
        direct = self._files.direct
        ready = [not direct or is_aligned(payload) for payload in payloads]
        staged_pages = sum(pages_of(len(p)) for p, is_ready in zip(payloads, ready, strict=True) if not is_ready)
        with self._buffers.lend((extent.head_pages + staged_pages) * PAGE) as stage:
            buffers = [fill_pages(stage, pack_extent_head(extent.segment.id, extent.page, extent.num_pages, entries))]
            at = len(buffers[0])
            for payload, is_ready in zip(payloads, ready, strict=True):
                if is_ready:
                    buffers += _with_padding(payload)
                else:
                    buffers.append(fill_pages(stage[at:], payload))
                    at += len(buffers[-1])
            with self.descriptors.use(extent.segment.number, self.path(extent.segment)) as fd:
                self._files.write(fd, buffers, extent.page * PAGE)
                forgets = sync_forgets and any(kind is not Kind.RECORD for kind in kinds)
                if self._sync is SyncPolicy.BATCH or (forgets and self._sync is SyncPolicy.SEALED):
                    self._files.sync(fd)
        return entries

    def seal(self, segment: Segment) -> None:
        """Writes the footer of a segment that `LogState.to_seal` gave, and cuts what is behind. Raises nothing.

        When it fails, the segment stays as it is: readable, and scanned by the next start.
        """
        entries = concatenated(segment.landed)  # nobody adds to it any more
        end = segment.next_page + footer_pages(len(entries))
        try:
            with self._buffers.lend((end - segment.next_page) * PAGE) as footer:
                copy_bytes(footer, pack_footer(segment.id, segment.next_page, entries))
                with self.descriptors.use(segment.number, self.path(segment)) as fd:
                    self._files.write(fd, [footer], segment.next_page * PAGE)
                    self._files.truncate(fd, end * PAGE)
        except OSError as error:
            self._health.note("seal", error)
            with self._state.lock:
                segment.in_flight -= 1
            return
        with self._state.lock:
            self._state.segments.sealed(segment, end)
            segment.in_flight -= 1
        if self._sync is not SyncPolicy.NONE:
            self._syncer.submit(partial(self._sync_sealed, segment))

    def entries(self, segment: Segment) -> Entries | None:
        """Everything that has landed in it; None when its footer is damaged."""
        with self._state.lock:
            landed = None if segment.sealed else list(segment.landed)
        if landed is not None:
            return concatenated(landed)
        with self.descriptors.use(segment.number, self.path(segment)) as fd:
            return self.reader.entries(fd, segment.id, segment.num_pages)

    def compact(self, segment: Segment, forgets: Entries) -> int:
        """Leaves these tombstones and nothing else of a segment; its pages then. Nobody writes to it; readers miss.

        They are written over what it had first, with a footer of their own, then the file is cut behind them: until
        that has happened, its old footer counts, and what was overwritten is found out by its checksums.
        """
        head, num_pages = head_pages(len(forgets)), 1 + head_pages(len(forgets)) + footer_pages(len(forgets))
        forgets = forgets.copy()
        forgets["page"] = 0
        with self._buffers.lend((num_pages - 1) * PAGE) as pages:
            copy_bytes(pages, pack_extent_head(segment.id, 1, head, forgets))
            copy_bytes(pages[head * PAGE :], pack_footer(segment.id, 1 + head, forgets))
            with self.descriptors.use(segment.number, self.path(segment)) as fd:
                self._files.write(fd, [pages], PAGE)
                if self._sync is not SyncPolicy.NONE:
                    self._files.sync(fd)
                self._files.truncate(fd, num_pages * PAGE)
        return num_pages

    def read(self, number: int, pieces: Sequence[memoryview], page: int) -> int:
        """Fills `pieces` from this page of the segment on, until its file ends; returns the bytes read. `OSError`."""
        with self.descriptors.use(number, self._folder.segment_path(number)) as fd:
            return self._files.read(fd, pieces, page * PAGE)

    def remove(self, segment: Segment) -> bool:
        """False when the file is still there, with nothing in it. Nobody writes to it; its readers miss.

        The file is cut before it is unlinked: its space is free although somebody may have it open. `OSError` when
        neither works; failures are counted and logged.
        """
        return self._take_away(segment.number)

    def drop(self, number: int) -> None:
        """Removes a file that is no segment of the books; what cannot be is counted as used. Raises nothing."""
        try:
            self._take_away(number)
        except OSError:  # counted and logged
            try:
                nbytes = self._files.size(self._folder.segment_path(number))
            except OSError as error:  # a broken inode: nobody can say
                self._health.note("remove", error)
                return
            with self._state.lock:
                self._state.segments.set_aside(pages_of(nbytes) * PAGE)

    def _create(self, segment: Segment) -> int:
        path = self.path(segment)
        try:
            return self._files.create(path, segment.num_pages * PAGE)
        except FileExistsError:  # somebody else's
            raise
        except OSError:
            self.drop(segment.number)
            raise

    def _take_away(self, number: int) -> bool:
        path, is_cut = self._folder.segment_path(number), False
        try:
            with self.descriptors.use(number, path) as fd:
                self._files.truncate(fd, 0)
            is_cut = True
        except FileNotFoundError:
            pass
        except OSError as error:
            self._health.note("remove", error)
        self.descriptors.forget(number)
        try:
            self._files.remove(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            self._health.note("remove", error)
            if not is_cut:
                raise
            return False
        return True

    def close(self) -> None:
        """Waits for syncs under way, then closes all files. Raises nothing."""
        self._syncer.close()
        self.descriptors.close()

    def _sync_sealed(self, segment: Segment) -> None:
        try:
            with self.descriptors.use(segment.number, self.path(segment)) as fd:
                self._files.sync(fd)
        except FileNotFoundError:  # evicted already
            pass
        except OSError as error:
            self._health.note("sync", error)


def _with_padding(payload: ReadableBuffer) -> list[memoryview]:
    """A payload, and zeros up to the end of its page."""
    missing = -len(payload) % PAGE
    view = memoryview(payload)
    return [view, memoryview(bytes(missing))] if missing else [view] if len(view) else []
