"""Pages in the cache pool: whether they are there, reading them, writing them. What fails is not there."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from kvtier.clock import MONOTONIC, Clock
from kvtier.codec.checksums import checksum
from kvtier.identity.keys import BlockKey, NamespaceId, StoreKey, rank_keys
from kvtier.memory.pieces import Payload, Target
from kvtier.tiers.base import Status, Tier, TierOf, WriteStatus
from kvtier_sglang.host_pages import Lent
from kvtier_sglang.metrics import StorageStats
from kvtier_sglang.page_keys import PageKeys
from kvtier_sglang.page_kinds import KeysOf, PageKind, Wanted, part_keys
from kvtier_sglang.pending_pages import Items, Outcome, PendingPages
from kvtier_sglang.previous_pages import PreviousPages

_THERE = (WriteStatus.STORED, WriteStatus.EXISTS)
_OF_OTHERS: dict[Status, Outcome] = {
    Status.HIT: WriteStatus.EXISTS,
    Status.PENDING: None,
    Status.MISS: WriteStatus.FAILED,
}
"""What has come of a block that was not written here, by what the pool has now."""
_MAX_SEEN = 1 << 17
"""Pages that `clear` can forget: some 20 MB of keys."""
_T = TypeVar("_T")
Lend = Callable[[Sequence[int]], Lent]
"""Buffers for the pages at these places in the call."""


class PageStore:
    """The pages in the pool. Any thread. Methods take a few deadlines of the tiers at most, and raise nothing for them.

    A page is there when all its parts are, and is read as a whole or not at all.
    """

    def __init__(
        self,
        keys: PageKeys,
        *,
        queries: Tier,
        data: TierOf[Payload, Target],
        stats: StorageStats,
        patience_s: float,
        clock: Clock = MONOTONIC,
    ) -> None:
        """
        :param queries: the pool, for questions: with a short deadline, and not behind transfers.
        :param data: the same pool, for transfers.
        :param patience_s: after which a call of SGLang's begins no further transfer. After one that takes longer than
            that the pool is left alone for as long again: SGLang makes many calls, one after the other, before it looks
            whether its thread should end.
        """
        self._keys, self._queries, self._data = keys, queries, data
        self._previous = PreviousPages(keys)
        self._stats = stats
        self._patience_s, self._clock = patience_s, clock
        self._not_before_s = 0.0
        """When SGLang's calls may begin transfers again. A single number, written whole: any thread."""
        self._lock = threading.Lock()
        self._seen: OrderedDict[tuple[tuple[NamespaceId, ...], BlockKey], None] = OrderedDict()
        """Pages that were found or written, the oldest first: a plain dict that loses items there takes ever longer to
        find the first one. Guarded by _lock."""

    def present(self, wanted: Wanted) -> list[list[bool]]:
        """Returns which pages of several kinds are there. One round trip for all; where some are missing, one more for
        each previous secret, and another one if it has any."""
        answers = self._present(wanted, self._keys.of)
        return self._previous.search(wanted, answers, self._present)

    def _present(self, wanted: Wanted, keys_of: KeysOf) -> list[list[bool]]:
        """Returns which pages the pool has by these names."""
        named = [(kind, keys_of(names)) for kind, names in wanted]
        keys = [key for kind, of_kind in named for key in part_keys(kind, of_kind)]
        found = iter(self._queries.lookup(keys) if keys else [])
        answers: list[list[bool]] = []
        for kind, of_kind in named:
            is_there = [True] * len(of_kind)
            for _ in kind.namespaces:
                for i, status in zip(range(len(of_kind)), found, strict=False):
                    is_there[i] = is_there[i] and status is Status.HIT
            answers.append(is_there)
            self._note_seen(kind, of_kind, is_there)
        return answers

    def begin_by(self) -> float:
        """Returns the time until which a call of SGLang's that comes now may begin transfers; each has a deadline of
        its own."""
        return self._clock() + self._patience_s

    def read(self, kind: PageKind, names: Sequence[str], lend: Lend, begin_by: float) -> list[bool]:
        """Reads pages into what `lend` gives, until one is missing: those after it are of no use."""
        started, got = self._clock(), [False] * len(names)
        for places in _batches(range(len(names)), kind.batch_pages):
            if not self._may_begin(begin_by):
                break
            lent = lend(places)
            into = [page[part] for part in range(len(kind.namespaces)) for page in lent.buffers]
            begun = self._clock()
            wanted = [names[i] for i in places]
            own = self._keys.of(wanted)
            keys = self._previous.keys(kind, wanted, own)
            statuses = self._data.read(part_keys(kind, keys), into)
            self._note_pace(begun)
            for i, of_page in zip(places, _by_page(statuses, len(places)), strict=True):
                got[i] = all(status is Status.HIT for status in of_page)
            self._previous.forget(kind, wanted)
            renamed = [n for n, i in enumerate(places) if got[i] and keys[n] != own[n]]
            self._rename(kind, [wanted[n] for n in renamed], [lent.buffers[n] for n in renamed], begin_by)
            lent.give_back()
            if not all(got[i] for i in places):
                break
        num_hits = sum(got)
        self._stats.count(kind.name, "read", "hit", num_hits)
        self._stats.count(kind.name, "read", "miss", len(names) - num_hits)
        self._stats.sample("read", num_hits, num_hits * sum(kind.part_bytes), self._clock() - started)
        return got

    def write(
        self, kind: PageKind, names: Sequence[str], lend: Lend, begin_by: float, owed: PendingPages
    ) -> list[bool]:
        """Writes pages that are not there. True: the pool has it, or it waits in `owed`. What is lent is not kept."""
        started = self._clock()
        is_kept = [False] * len(names)
        if self._may_begin(begin_by):
            is_kept = self._present([(kind, names)], self._keys.of)[0]
            self._note_pace(started)
        self._stats.count(kind.name, "write", "exists", sum(is_kept))
        firsts = rank_keys(self._keys.of(names), kind.namespaces[0])
        is_kept = [kept or owed.has(first) for kept, first in zip(is_kept, firsts, strict=True)]
        num_stored, is_well = 0, True
        for places in _batches([i for i, kept in enumerate(is_kept) if not kept], kind.batch_pages):
            lent = lend(places)
            pages = self._items(kind, [names[i] for i in places], lent.buffers)
            may_try = is_well and self._may_begin(begin_by)
            statuses = self._write_now(pages) if may_try else [WriteStatus.FAILED] * len(pages)
            for i, items, status in zip(places, pages, statuses, strict=True):
                is_stored = status in _THERE
                is_kept[i] = is_stored or (status is not WriteStatus.FULL and owed.add(items))
                num_stored += is_stored
                outcome = status.name.lower() if is_stored else "owed" if is_kept[i] else "dropped"
                self._stats.count(kind.name, "write", outcome)
            lent.give_back()
            # A pool that takes none of them is busy or away: more would only be sent in vain.
            is_well = any(status in _THERE for status in statuses)
        self._note_seen(kind, self._keys.of(names), is_kept)
        self._stats.sample("write", num_stored, num_stored * sum(kind.part_bytes), self._clock() - started)
        return is_kept

    def write_owed(self, items: Items) -> list[Outcome]:
        """Tries again what was owed; what came of each item."""
        outcomes = [_OF_OTHERS[status] for status in self._ask([key for key, _, _ in items])]
        missing = [i for i, outcome in enumerate(outcomes) if outcome is WriteStatus.FAILED]
        for i, outcome in zip(missing, self._write_surely([items[i] for i in missing]), strict=True):
            outcomes[i] = outcome
        return outcomes

    def clear(self) -> None:
        """Has the pool forget what this process has written or found there, as far as it remembers and time allows."""
        begin_by = self.begin_by()
        with self._lock:
            seen = list(self._seen)
            self._seen.clear()
        by_kind: dict[tuple[NamespaceId, ...], list[BlockKey]] = {}
        for namespaces, key in seen:
            by_kind.setdefault(namespaces, []).append(key)
        for namespaces, keys in by_kind.items():
            for namespace in namespaces:
                if self._clock() > begin_by:
                    return
                self._data.discard(rank_keys(keys, namespace))

    def _write_now(self, pages: Sequence[Items]) -> list[WriteStatus]:
        """Returns one status per page, the worst of its parts'; FAILED also for what another writer has begun."""
        items = [page[part] for part in range(len(pages[0])) for page in pages]
        begun = self._clock()
        outcomes = [WriteStatus.FAILED if outcome is None else outcome for outcome in self._write_surely(items)]
        self._note_pace(begun)
        return [max(parts) for parts in _by_page(outcomes, len(pages))]

    def _write_surely(self, items: Items) -> list[Outcome]:
        """Writes the items and returns the outcome of each; EXISTS only for what is there by now.

        Another writer may never end: its patience has ended, or it has died, and the pool has not noticed yet. It may
        be this process itself, a moment ago.
        """
        outcomes: list[Outcome] = list(self._data.write(items))
        unsure = [i for i, outcome in enumerate(outcomes) if outcome is WriteStatus.EXISTS]
        for i, status in zip(unsure, self._ask([items[i][0] for i in unsure]), strict=True):
            outcomes[i] = _OF_OTHERS[status]
        return outcomes

    def _may_begin(self, begin_by: float) -> bool:
        """Whether a call may begin a transfer now."""
        return self._not_before_s <= self._clock() <= begin_by

    def _note_pace(self, begun: float) -> None:
        """A transfer has ended, or the question before it, which may leave no time for one."""
        now = self._clock()
        if now - begun > self._patience_s:
            self._not_before_s = now + self._patience_s

    def _ask(self, keys: Sequence[StoreKey]) -> list[Status]:
        return self._queries.lookup(keys) if keys else []

    def _items(self, kind: PageKind, names: Sequence[str], buffers: Sequence[Sequence[Target]]) -> list[Items]:
        """The parts of each page, with their keys and checksums."""
        keys = list(_by_page(part_keys(kind, self._keys.of(names)), len(names)))
        return [
            [(key, part, checksum(key, part)) for key, part in zip(of_page, page, strict=True)]
            for of_page, page in zip(keys, buffers, strict=True)
        ]

    def _rename(self, kind: PageKind, names: Sequence[str], pages: Sequence[Sequence[Target]], begin_by: float) -> None:
        """Writes pages that came by a previous name by their own. What fails is tried again when they come again."""
        if names and self._may_begin(begin_by):
            begun = self._clock()
            items = [item for page in self._items(kind, names, pages) for item in page]
            self._data.write(items)
            self._note_pace(begun)
        self._stats.count(kind.name, "read", "previous", len(names))

    def _note_seen(self, kind: PageKind, keys: Sequence[BlockKey], is_there: Sequence[bool]) -> None:
        with self._lock:
            for key, there in zip(keys, is_there, strict=True):
                if there:
                    self._seen[kind.namespaces, key] = None
            while len(self._seen) > _MAX_SEEN:
                self._seen.popitem(last=False)


def _by_page(answers: Sequence[_T], num_pages: int) -> Iterator[tuple[_T, ...]]:
    """Groups answers that are in the order of `part_keys` by page."""
    return zip(*(answers[start : start + num_pages] for start in range(0, len(answers), num_pages)), strict=True)


def _batches(places: Sequence[int], most: int) -> Iterator[Sequence[int]]:
    """Divides the places into batches of at most so many."""
    return (places[start : start + most] for start in range(0, len(places), most))
