"""Writing blocks: encoded, appended in one write per part of a batch, then found."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from prometheus_client import Counter

from kvtier.events import EventKind
from kvtier.identity.keys import TENANT_ID_BYTES, TenantId
from kvtier.memory.buffers import ReadableBuffer
from kvtier.tiers.base import Item, WriteStatus
from kvtier.tiers.common.event_queue import EventQueue
from kvtier.tiers.common.packer import BlockPacker
from kvtier.tiers.disk.log.format import MAX_STORED_BYTES, Entries, Kind, pages_of
from kvtier.tiers.disk.medium.folder import FolderLostError
from kvtier.tiers.disk.medium.health import MediumHealth
from kvtier.tiers.disk.operations.appending import SegmentLog
from kvtier.tiers.disk.operations.tombstones import Tombstones
from kvtier.tiers.disk.state.log_state import Claim, LogState, switch_off

_PART_BYTES = 8 << 20
"""Written at once: enough for full speed, few enough for several threads."""
_PART_BLOCKS = 256

Work = tuple[int, Claim, ReadableBuffer, int]
"""Place in the caller's batch, claim, payload, the writer's checksum."""
Outcome = tuple[int, "WriteStatus | BaseException"]
"""Place in the caller's batch; an exception is the caller's fault."""


def sort_out(
    items: Sequence[Item[ReadableBuffer]],
) -> tuple[Sequence[Item[ReadableBuffer]], list[BaseException]]:
    """Items whose payloads are contiguous bytes, whose length is what they take; and what the others raise."""
    errors: list[BaseException] = []
    sound = []
    for item in items:
        try:
            view = memoryview(item[1])
            if view.ndim != 1 or view.itemsize != 1 or not view.c_contiguous:
                raise BufferError(f"payload of shape {view.shape}, format {view.format!r}: needs contiguous bytes")
            sound.append(item)
        except (BufferError, TypeError, ValueError) as error:
            errors.append(error)
    return sound, errors


def parts_of(work: Iterable[Work], most_bytes: int) -> Iterator[list[Work]]:
    """Parts of a batch, each of one tenant, in order.

    :param most_bytes: of a part of several blocks, beside a bound of its own.
    """
    by_tenant: dict[bytes, list[Work]] = {}
    for item in work:
        by_tenant.setdefault(item[1].key[:TENANT_ID_BYTES], []).append(item)
    most_bytes = min(most_bytes, _PART_BYTES)
    for items in by_tenant.values():
        part: list[Work] = []
        nbytes = 0
        for item in items:
            if part and (nbytes + len(item[2]) > most_bytes or len(part) == _PART_BLOCKS):
                yield part
                part, nbytes = [], 0
            part.append(item)
            nbytes += len(item[2])
        yield part


class BlockWriter:
    """Stores parts of batches. Any thread."""

    def __init__(  # noqa: PLR0913 - the parts that it is put together from
        self,
        state: LogState,
        log: SegmentLog,
        tombstones: Tombstones,
        events: EventQueue,
        health: MediumHealth,
        new_bytes: Counter,
        packer: BlockPacker,
    ) -> None:
        self._state = state
        self._log = log
        self._tombstones = tombstones
        self._events = events
        self._health = health
        self._new_bytes = new_bytes
        self._packer = packer

    def store(self, part: Sequence[Work]) -> list[Outcome]:
        """Packs claimed blocks of one tenant, and writes them. An answer per block; nothing is raised.

        The claims are given back.
        """
        outcomes: list[Outcome] = []
        ready: list[tuple[Work, bytes, ReadableBuffer]] = []
        for work in part:
            index, claim, payload, checksum = work
            try:
                header, stored = self._packer.encode(claim.key, payload, checksum)
            except BaseException as error:
                self._release([claim])
                outcomes.append((index, error))
                continue
            if max(len(payload), len(stored)) > MAX_STORED_BYTES:
                self._release([claim])
                outcomes.append((index, WriteStatus.FULL))
            else:
                ready.append((work, header, stored))
        if not ready:
            return outcomes
        claims, headers, payloads = [w[1] for w, _, _ in ready], [h for _, h, _ in ready], [s for _, _, s in ready]
        status = self._try_to_append(claims, headers, payloads)
        return outcomes + [(work[0], status) for work, _, _ in ready]

    def give_back(self, part: Sequence[Work]) -> None:
        """These blocks will not be written."""
        self._release([claim for _, claim, _, _ in part])

    def _try_to_append(
        self,
        claims: Sequence[Claim],
        headers: Sequence[bytes],
        payloads: Sequence[ReadableBuffer],
    ) -> WriteStatus | BaseException:
        """What became of all of them; the claims are given back."""
        status: WriteStatus | BaseException
        try:
            status = self._append(claims, headers, payloads)
        except FolderLostError as error:
            status = WriteStatus.FAILED
            if self._health.lost_folder(error):
                switch_off(self._state, self._events)
        except OSError as error:
            status = self._health.write_failed(error)
        except BaseException as error:
            status = error
        if status is not WriteStatus.STORED:
            self._release(claims)
        return status

    def _append(
        self,
        claims: Sequence[Claim],
        headers: Sequence[bytes],
        payloads: Sequence[ReadableBuffer],
    ) -> WriteStatus:
        tenant = TenantId(claims[0].key[:TENANT_ID_BYTES])
        epochs = [claim.epoch for claim in claims]
        extent = self._log.reserve(tenant, len(claims), sum(pages_of(len(p)) for p in payloads), min(epochs))
        if extent is None:
            return WriteStatus.FULL
        stamps = [(epoch, Kind.RECORD) for epoch in epochs]
        landed = self._log.write(extent, headers, payloads, stamps)
        tags = self._state.tags([claim.key for claim in claims])
        with self._state.lock:
            for claim in claims:
                claim.discarded = self._state.forgotten_at(claim)
            visible = np.array([not claim.discarded for claim in claims], bool)
            published: Entries = landed[visible]
            self._state.publish(extent.segment, published, tags[visible])
            self._state.new_bytes += sum(map(len, payloads))
            for claim in claims:
                self._state.release(claim)
            self._events.post(EventKind.STORED, [c.key for c in claims if not c.discarded])
            to_seal = self._log.settle(extent, landed)
        self._log.seal(to_seal)
        self._new_bytes.inc(sum(map(len, payloads)))
        self._health.wrote()
        if not visible.all():
            late = [claim for claim in claims if claim.discarded]
            self._tombstones.forget_late(tenant, late, extent.segment.number)
        return WriteStatus.STORED

    def _release(self, claims: Sequence[Claim]) -> None:
        with self._state.lock:
            for claim in claims:
                self._state.release(claim)
