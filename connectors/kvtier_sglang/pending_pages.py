"""Pages that the pool did not take when SGLang gave them, kept as copies and tried again.

SGLang offers a page once. One that is missing makes all pages after it worthless, since prefixes are found from the
front: so nothing is given up that has a chance, in the order in which it came.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvtier.clock import MONOTONIC, Clock
from kvtier.identity.keys import StoreKey
from kvtier.memory.pieces import Payload, Pieces
from kvtier.tiers.base import Item, WriteStatus

_log = logging.getLogger(__name__)
_BATCH_BYTES = 32 << 20
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
_OTHERS_S = 30.0
"""How long a page waits, in seconds, for another writer that has begun it. No call of a client lasts longer: a writer
that has not ended by then is a stopped process, whose slots the pool keeps as long as it lives."""
Outcome = WriteStatus | None
"""None: another writer has begun it, and may yet fail."""
_AGAIN = (WriteStatus.FAILED, WriteStatus.THROTTLED, None)
Items = Sequence[Item[Payload]]
"""The parts of a page, or of several."""
Write = Callable[[Items], Sequence[Outcome]]


@dataclass(slots=True)
class _Page:
    items: Items
    nbytes: int
    number: int
    """The number of this page; pages are counted as they come."""
    give_up_at: float
    others_since: float | None = None
    """Another writer has had it, each time that it was tried. The thread's."""


class PendingPages:
    """Bounded in bytes and in time; a thread of its own writes. Any thread; `add` copies, nothing but `close` waits."""

    def __init__(
        self,
        write: Write,
        *,
        capacity_bytes: int,
        keep_s: float,
        on_settled: Callable[[str], None],
        clock: Clock = MONOTONIC,
    ) -> None:
        """
        :param write: called by the thread; answers within a deadline of its own.
        :param capacity_bytes: of all pages that wait; one beyond is refused.
        :param keep_s: after which a page that was never taken is dropped.
        :param on_settled: called by the thread for each page that leaves: `retried` or `dropped`.
        """
        self._write, self._capacity_bytes, self._keep_s = write, capacity_bytes, keep_s
        self._on_settled, self._clock = on_settled, clock
        self._changed = threading.Condition()
        self._pages: dict[StoreKey, _Page] = {}
        """Waiting pages by the key of their first part, the oldest first. Guarded by _changed."""
        self._waiting_bytes = 0
        """Guarded by _changed."""
        self._num_added = 0
        """The number of pages added since the beginning. Guarded by _changed."""
        self._close_by: float | None = None
        """When to stop trying; None: not closing. Guarded by _changed."""
        self._thread = threading.Thread(target=self._run, name="kvtier-owed", daemon=True)
        self._thread.start()

    @property
    def waiting_bytes(self) -> int:
        """The bytes of all pages that wait."""
        return self._waiting_bytes

    def has(self, key: StoreKey) -> bool:
        """Whether the page whose first part is called so waits already."""
        with self._changed:
            return key in self._pages

    def add(self, items: Items) -> bool:
        """Copies a page, to be written when the pool takes it. False: there is no room, or no time any more."""
        first, nbytes = items[0][0], sum(len(payload) for _, payload, _ in items)
        with self._changed:
            if first in self._pages:
                return True
            if self._close_by is not None or self._waiting_bytes + nbytes > self._capacity_bytes:
                return False
            self._waiting_bytes += nbytes
        copies: list[Item[Payload]] = []
        try:
            copies += ((key, _copy(payload), checksum) for key, payload, checksum in items)
        finally:
            with self._changed:
                is_new = len(copies) == len(items) and first not in self._pages and self._close_by is None
                if is_new:
                    self._num_added += 1
                    self._pages[first] = _Page(copies, nbytes, self._num_added, self._clock() + self._keep_s)
                    self._changed.notify_all()
                else:
                    self._waiting_bytes -= nbytes
                is_kept = first in self._pages
        return is_kept

    def forget(self) -> None:
        """Drops all that waits, but for what is being written at this moment."""
        with self._changed:
            self._waiting_bytes -= sum(page.nbytes for page in self._pages.values())
            self._pages.clear()
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Waits until nothing waits; False: something still does."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pages, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Writes what waits, for at most so long and the one write under way. Idempotent."""
        with self._changed:
            if self._close_by is None:
                self._close_by = self._clock() + timeout_s
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        pause_s = 0.0
        while newest := self._begin_round(pause_s):
            is_better, tried = False, 0
            while batch := self._next(tried, newest):
                is_better |= self._settle(batch, self._try(batch))
                tried = batch[-1].number
            pause_s = 0.0 if is_better else min(max(2 * pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
        with self._changed:
            if self._pages:
                _log.warning("%d pages that the pool did not take are lost", len(self._pages))

    def _begin_round(self, pause_s: float) -> int:
        """Waits for pages, and as long as that beforehand. The number of the newest; 0 when it is time to end.

        In a round each page is tried once: one that has to wait for somebody else keeps nobody behind it.
        """
        with self._changed:
            if pause_s:
                self._changed.wait_for(lambda: self._close_by is not None, pause_s)
            self._changed.wait_for(lambda: self._pages or self._close_by is not None)
            if pause_s and self._close_by is not None:
                # Closing ends a pause at once; from then on pauses are short ones.
                self._changed.wait(_FIRST_PAUSE_S)
            return self._num_added if self._pages and not self._is_over() else 0

    def _next(self, tried: int, newest: int) -> list[_Page]:
        """The oldest pages that this round has not tried yet; none when it is at its end."""
        batch: list[_Page] = []
        nbytes = 0
        with self._changed:
            for page in () if self._is_over() else self._pages.values():
                if not tried < page.number <= newest:
                    continue
                if batch and nbytes + page.nbytes > _BATCH_BYTES:
                    break
                batch.append(page)
                nbytes += page.nbytes
        return batch

    def _is_over(self) -> bool:
        """Caller holds _changed."""
        return self._close_by is not None and self._clock() >= self._close_by

    def _try(self, batch: Sequence[_Page]) -> list[list[Outcome]]:
        """What came of each page's parts."""
        try:
            outcomes = iter(self._write([item for page in batch for item in page.items]))
            return [[next(outcomes) for _ in page.items] for page in batch]
        except Exception:
            # Tiers do not raise. A bug in one must not end this thread, or nothing would be tried again.
            _log.exception("writing %d pages failed", len(batch))
            return [[WriteStatus.FAILED] * len(page.items) for page in batch]

    def _settle(self, batch: Sequence[_Page], outcomes: Sequence[Sequence[Outcome]]) -> bool:
        """Lets go of what is written or has no chance. Whether any was."""
        now = self._clock()
        settled: list[str] = []
        with self._changed:
            for page, of_parts in zip(batch, outcomes, strict=True):
                is_open = any(outcome in _AGAIN for outcome in of_parts)
                if is_open and WriteStatus.FULL not in of_parts and now < self._give_up_at(page, of_parts, now):
                    continue
                settled.append("dropped" if is_open or WriteStatus.FULL in of_parts else "retried")
                first = page.items[0][0]
                if self._pages.get(first) is page:
                    del self._pages[first]
                    self._waiting_bytes -= page.nbytes
            self._changed.notify_all()
        for outcome in settled:
            self._on_settled(outcome)
        return bool(settled)

    @staticmethod
    def _give_up_at(page: _Page, outcomes: Sequence[Outcome], now: float) -> float:
        if None not in outcomes:
            page.others_since = None
            return page.give_up_at
        if page.others_since is None:
            page.others_since = now
        return min(page.give_up_at, page.others_since + _OTHERS_S)


def _copy(payload: Payload) -> memoryview:
    return payload.copied() if isinstance(payload, Pieces) else np.frombuffer(payload, dtype=np.uint8).copy().data
