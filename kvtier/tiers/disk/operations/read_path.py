"""Which blocks to read where, and what becomes of them: bad ones are dropped, moved ones are looked for again."""

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np

from kvtier.codec.stored_form import Codec, Header
from kvtier.events import EventKind
from kvtier.identity.keys import StoreKey, TenantId, tenant_of
from kvtier.tiers.base import Status
from kvtier.tiers.common.event_queue import EventQueue
from kvtier.tiers.common.lent_memory import LentMemory
from kvtier.tiers.disk.log.parts import BatchThreads
from kvtier.tiers.disk.log.reading import Answer, BlockReader, Wanted, runs_of
from kvtier.tiers.disk.medium.health import MediumHealth, is_passing
from kvtier.tiers.disk.operations.tombstones import Tombstones
from kvtier.tiers.disk.state.index import CODEC_MASK, VERSION_SHIFT
from kvtier.tiers.disk.state.log_state import LogState, switch_off

_ROUNDS = 3
"""A block that is moved while it is read is read again where it is then."""
_PLACE = ("segment", "page", "form", "key_id", "raw_length", "stored_length", "checksum")


class ReadPath:
    """Reads blocks by their keys. Any thread."""

    def __init__(
        self,
        state: LogState,
        tombstones: Tombstones,
        events: EventQueue,
        health: MediumHealth,
        reader: BlockReader,
        threads: BatchThreads,
    ) -> None:
        self._reader = reader
        self._threads = threads
        self._state = state
        self._tombstones = tombstones
        self._events = events
        self._health = health

    def read(
        self,
        keys: Sequence[StoreKey],
        into: Sequence[memoryview],
        lent: LentMemory,
    ) -> list[Status]:
        """Fills `into[i]` with the payload of `keys[i]`; a status per key, in order. Blocks moved meanwhile are read
        again. What hangs is a miss, and `lent` knows what goes on using its buffer.
        """
        statuses = [Status.MISS] * len(keys)
        left: Sequence[int] = range(len(keys))
        for _ in range(_ROUNDS):
            if not left or self._threads.hang:
                break
            answers = self._read_blocks(self._find(keys, into, left), lent)
            for answer in answers:
                if answer.problem is None:
                    statuses[answer.wanted.index] = Status.HIT
            left = self._note(answers)
        return statuses

    def _read_blocks(self, wanted: Sequence[Wanted], lent: LentMemory) -> list[Answer]:
        """Runs of neighbours in parallel, in any order. No answer for those that hang."""
        done = self._threads.each(self._reader.read, runs_of(wanted), _owner, lent)
        return list(chain.from_iterable(done.answers))

    def _find(self, keys: Sequence[StoreKey], into: Sequence[memoryview], left: Sequence[int]) -> list[Wanted]:
        """Returns where the blocks are that are there and as long as what they are to fill."""
        tags = self._state.tags([keys[i] for i in left])
        with self._state.lock:
            rows, records = self._state.use(tags)
            if self._state.untold:
                self._events.post(EventKind.REMOVED, [keys[left[at]] for at in np.flatnonzero(rows < 0).tolist()])
        there = np.flatnonzero(rows >= 0).tolist()
        fields = zip(*(records[name].tolist() for name in _PLACE), strict=True)
        wanted = []
        for at, (segment, page, form, key_id, raw, stored, checksum) in zip(there, fields, strict=True):
            index = left[at]
            if raw == len(into[index]):
                codec, version = Codec(form & CODEC_MASK), form >> VERSION_SHIFT
                header = Header(keys[index], codec, raw, stored, checksum, version, key_id)
                wanted.append(Wanted(index, segment, page, header, into[index]))
        return wanted

    def _note(self, answers: Iterable[Answer]) -> list[int]:
        """Drops what turned out bad; what was moved or evicted meanwhile is to be looked for again."""
        again: list[int] = []
        bad: list[Answer] = []
        for answer in answers:
            if answer.problem is None:
                self._health.read()
            elif isinstance(answer.problem, OSError) and is_passing(answer.problem):
                self._health.note("read", answer.problem)
            else:
                bad.append(answer)
        places = [(a.wanted.header.key, a.wanted.segment, a.wanted.page) for a in bad]
        dropped = self._tombstones.drop(places) if places else []
        for answer, is_dropped in zip(bad, dropped, strict=True):
            if not is_dropped:
                again.append(answer.wanted.index)
            elif not isinstance(answer.problem, OSError):
                self._health.corrupt(answer.problem)
            elif self._health.read_failed(answer.problem, answer.wanted.segment):
                switch_off(self._state, self._events)
        return again


def _owner(run: Sequence[Wanted]) -> TenantId:
    return tenant_of(run[0].header.key)
