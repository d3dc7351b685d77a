"""Files of segments that are gone, kept for the next ones: all zeros, but on the disk space that they had.

Space that a file system gives out anew may take twice as long to write to: a volume that is thin, or told of what is
freed (`discard`), has to find some first. And cutting a file takes as long as writing 20 MiB to it.
"""

from dataclasses import dataclass

from kvtier.tiers.disk.log.format import PAGE
from kvtier.tiers.disk.log.segments import Segment
from kvtier.tiers.disk.state.log_state import LogState
from kvtier.tiers.disk.state.segment_files import SegmentFiles

_LEAST_BYTES = 8 << 20
"""A smaller file is made as fast."""
_MOST = 4
"""About so many are kept: what a large batch fills while nothing is emptied."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Disk space of a file about to be made, counted as used."""

    num_pages: int
    spare: int | None = None
    """Number of a file that is to be that one."""


class RecycledFiles:
    """Files that count as used, and go before anything is evicted. Any thread; raises nothing."""

    def __init__(self, state: LogState, files: SegmentFiles) -> None:
        self._state = state
        self._files = files
        self._kept: dict[int, int] = {}
        """Pages by number. Guarded by the books' lock."""

    def place(self, num_pages: int, limit_bytes: int, *, take: bool = True) -> Reservation | None:
        """Room for a file, in a spare if one will do; None when there is none. Under the lock.

        :param limit_bytes: what all files may take.
        :param take: count it as used; else only look.
        """
        segments = self._state.segments
        spare = next((n for n, pages in self._kept.items() if num_pages // 2 <= pages <= num_pages), None)
        missing = num_pages - (self._kept[spare] if spare is not None else 0)
        if segments.used_bytes + missing * PAGE > limit_bytes:
            return None
        if take:
            segments.set_aside(missing * PAGE)
            if spare is not None:
                del self._kept[spare]
        return Reservation(num_pages, spare)

    def keep(self, segment: Segment, limit_bytes: int) -> bool:
        """Makes a spare of a marked segment, which is gone then; False when it is to be removed."""
        with self._state.lock:
            is_too_much = len(self._kept) >= _MOST or self._state.segments.used_bytes > limit_bytes
        if is_too_much or segment.num_pages * PAGE < _LEAST_BYTES or not self._files.empty(segment):
            return False
        with self._state.lock:
            self._state.segments.set_aside(segment.num_pages * PAGE)
            self._state.segments.gone(segment)
            self._kept[segment.number] = segment.num_pages
        return True

    def drop(self) -> bool:
        """Removes one; False when there was none."""
        with self._state.lock:
            number, num_pages = self._kept.popitem() if self._kept else (0, 0)
        if not num_pages:
            return False
        self._files.drop(number)
        with self._state.lock:
            self._state.segments.set_aside(-num_pages * PAGE)
        return True

    def close(self) -> None:
        """Removes all. Nobody asks for a place any more."""
        while self.drop():
            pass
