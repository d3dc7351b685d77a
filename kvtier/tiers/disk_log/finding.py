"""Which blocks to read where, and what becomes of them: bad ones are dropped, moved ones are looked for again."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from kvtier.codec import Codec, Header
from kvtier.events import EventKind
from kvtier.keys import StoreKey
from kvtier.tiers.base import Status
from kvtier.tiers.disk_log.books import Books
from kvtier.tiers.disk_log.forgetting import Forgetter
from kvtier.tiers.disk_log.reading import Answer, Wanted
from kvtier.tiers.disk_log.trouble import Trouble, is_passing
from kvtier.tiers.outbox import Outbox

_ROUNDS = 3
"""A block that is moved while it is read is read again where it is then."""
_PLACE = ("segment", "page", "codec", "raw_length", "stored_length", "checksum")

ReadBlocks = Callable[[Sequence[Wanted]], Iterable[Answer]]
"""An answer per block, in any order."""


class Finder:
    """Reads blocks by their keys. Any thread."""

    def __init__(self, books: Books, forgetter: Forgetter, outbox: Outbox, trouble: Trouble) -> None:
        self._books = books
        self._forgetter = forgetter
        self._outbox = outbox
        self._trouble = trouble

    def read(self, keys: Sequence[StoreKey], into: Sequence[memoryview], read_blocks: ReadBlocks) -> list[Status]:
        """See `Tier.read`."""
        statuses = [Status.MISS] * len(keys)
        left: Sequence[int] = range(len(keys))
        for _ in range(_ROUNDS):
            answers = list(read_blocks(self._find(keys, into, left)))
            for answer in answers:
                if answer.problem is None:
                    statuses[answer.wanted.index] = Status.HIT
            left = self._note(answers)
            if not left:
                break
        return statuses

    def _find(self, keys: Sequence[StoreKey], into: Sequence[memoryview], left: Sequence[int]) -> list[Wanted]:
        """Where the blocks are that are there and as long as what they are to fill."""
        tags = self._books.tags([keys[i] for i in left])
        with self._books.lock:
            rows, records = self._books.use(tags)
            if self._books.untold:
                self._outbox.post(EventKind.REMOVED, [keys[left[at]] for at in np.flatnonzero(rows < 0).tolist()])
        there = np.flatnonzero(rows >= 0).tolist()
        fields = zip(*(records[name].tolist() for name in _PLACE), strict=True)
        wanted = []
        for at, (segment, page, codec, raw, stored, checksum) in zip(there, fields, strict=True):
            index = left[at]
            if raw == len(into[index]):
                header = Header(keys[index], Codec(codec), raw, stored, checksum)
                wanted.append(Wanted(index, segment, page, header, into[index]))
        return wanted

    def _note(self, answers: Iterable[Answer]) -> list[int]:
        """Drops what turned out bad; what was moved or evicted meanwhile is to be looked for again."""
        again: list[int] = []
        bad: list[Answer] = []
        for answer in answers:
            if answer.problem is None:
                self._trouble.read()
            elif isinstance(answer.problem, OSError) and is_passing(answer.problem):
                self._trouble.note("read", answer.problem)
            else:
                bad.append(answer)
        places = [(a.wanted.header.key, a.wanted.segment, a.wanted.page) for a in bad]
        dropped = self._forgetter.drop(places) if places else []
        for answer, is_dropped in zip(bad, dropped, strict=True):
            if not is_dropped:
                again.append(answer.wanted.index)
            elif not isinstance(answer.problem, OSError):
                self._trouble.corrupt(answer.problem)
            elif self._trouble.read_failed(answer.problem, answer.wanted.segment):
                self._switch_off()
        return again

    def _switch_off(self) -> None:
        with self._books.lock:
            self._books.off = True
            self._outbox.post(EventKind.CLEARED)
