"""Batches on their way to the log: what is there already is left out, the rest is claimed and written in parts."""

from collections.abc import Sequence
from itertools import chain

from kvtier.identity.keys import StoreKey, TenantId, tenant_of
from kvtier.memory.buffers import ReadableBuffer
from kvtier.tiers.base import Item, Status, WriteStatus
from kvtier.tiers.common.event_queue import EventQueue
from kvtier.tiers.common.lent_memory import LentMemory
from kvtier.tiers.disk.log.parts import BatchThreads
from kvtier.tiers.disk.medium.health import MediumHealth
from kvtier.tiers.disk.operations.writing import BlockWriter, Work, parts_of
from kvtier.tiers.disk.state.log_state import LogState
from kvtier.tiers.disk.state.tag_table import Tags


class WritePath:
    """Writes batches. Any thread."""

    def __init__(
        self,
        state: LogState,
        events: EventQueue,
        health: MediumHealth,
        writer: BlockWriter,
        threads: BatchThreads,
        *,
        part_bytes: int,
    ) -> None:
        """:param part_bytes: see `parts_of`."""
        self._state = state
        self._events = events
        self._health = health
        self._writer = writer
        self._threads = threads
        self._part_bytes = part_bytes

    def write(
        self,
        items: Sequence[Item[ReadableBuffer]],
        errors: list[BaseException],
        lent: LentMemory,
    ) -> list[WriteStatus]:
        """An answer per item; `errors` gets what was raised for some, whose answers say nothing. What hangs is FAILED,
        and `lent` knows what goes on using its payload.
        """
        if self._threads.hang:
            return [WriteStatus.FAILED] * len(items)
        keys = [key for key, _, _ in items]
        tags = self._state.tags(keys)
        if self._state.off or not self._health.may_write():  # a stale look costs a failed write
            return self._refused(keys, tags)
        with self._state.lock:
            claims = self._state.claim(keys, tags)
        statuses = [WriteStatus.EXISTS if claim is None else WriteStatus.FAILED for claim in claims]
        work = [(i, claim, *items[i][1:]) for i, claim in enumerate(claims) if claim is not None]
        done = self._threads.each(self._writer.store, parts_of(work, self._part_bytes), _owner, lent)
        for part in done.cancelled:
            self._writer.give_back(part)
        for late in done.late:  # what becomes of it is told then
            late.add_done_callback(lambda _: self._events.flush())
        for index, status in chain.from_iterable(done.answers):
            if isinstance(status, WriteStatus):
                statuses[index] = status
            else:
                errors.append(status)
        return statuses

    def _refused(self, keys: Sequence[StoreKey], tags: Tags) -> list[WriteStatus]:
        """Answers while nothing is written."""
        with self._state.lock:
            statuses = self._state.statuses(keys, tags)
        return [WriteStatus.FAILED if status is Status.MISS else WriteStatus.EXISTS for status in statuses]


def _owner(part: Sequence[Work]) -> TenantId:
    return tenant_of(part[0][1].key)
