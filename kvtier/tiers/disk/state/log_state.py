"""What a disk tier knows: records, segments, writes under way. Everything that the tier's lock guards, in one place."""

import secrets
import threading
from collections import Counter
from collections.abc import Sequence

import numpy as np

from kvtier.errors import InvariantError
from kvtier.events import EventKind
from kvtier.identity.keys import TENANT_ID_BYTES, StoreKey, TenantId
from kvtier.tiers.base import Status
from kvtier.tiers.common.event_queue import EventQueue
from kvtier.tiers.disk.log.format import Entries, Kind, keys_of
from kvtier.tiers.disk.log.segments import NO_EPOCH, Extent, Segment
from kvtier.tiers.disk.state.index import RECORD, VERSION_SHIFT, RecordIndex, Records, tags_of
from kvtier.tiers.disk.state.segment_set import SegmentSet
from kvtier.tiers.disk.state.tag_table import Rows, Tags


class Claim:
    """A write under way. Fields are guarded by the tier's lock."""

    __slots__ = ("discarded", "epoch", "key")

    def __init__(self, key: StoreKey, epoch: int) -> None:
        self.key = key
        self.epoch = epoch
        self.discarded = 0
        """The epoch in which its key was discarded: what is written is not published. 0: it was not, but see
        `LogState.forgotten_at`."""

    @property
    def tenant(self) -> TenantId:
        return TenantId(self.key[:TENANT_ID_BYTES])


class LogState:
    """The state and the lock. Hold `lock` for every method and field but `seed` and `tags`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Never held across I/O."""
        self.seed = secrets.randbits(64)
        self.index = RecordIndex()
        self.segments = SegmentSet()
        self.pending: dict[StoreKey, Claim] = {}
        """Keys being written, by their visible claims."""
        self.claims: set[Claim] = set()
        """All writes under way, discarded ones too."""
        self._claimed: dict[TenantId, Counter[int]] = {}
        """Number of writes under way by tenant and epoch, an epoch for each batch. None is 0, no tenant is without
        one."""
        self.purged: dict[TenantId, int] = {}
        """Epoch of each tenant's last purge. Records with smaller ones are not there, nor will be."""
        self.purges_written: dict[TenantId, int] = {}
        """Epoch of each tenant's last purge whose tombstone is on disk: it stands for all tombstones before it."""
        self.purging: Counter[TenantId] = Counter()
        """Purges whose tombstone is not yet written. No record is moved meanwhile, since a copy is later than they."""
        self.forgetting: Counter[StoreKey] = Counter()
        """Keys whose tombstones are being written: they are no longer in the index, but still on disk."""
        self.num_forgetting = 0
        """Tombstones that are being written: those of a key that is discarded again are several."""
        self.epoch = 0
        """The last epoch that was given. What has a larger one is later, in this life of the folder or another."""
        self.new_bytes = 0
        """Bytes of records that were written because somebody asked for it."""
        self.moved_bytes = 0
        """Bytes of records that were written again, to be kept."""
        self.off = False
        """Nothing is found any more."""
        self.untold = False
        """Records have gone whose keys nobody could read: a reader of one of those then hears that it is not there."""

    def tags(self, keys: Sequence[StoreKey]) -> Tags:
        """Digests of keys. No lock needed."""
        return tags_of(keys, self.seed)

    def next_epoch(self) -> int:
        self.epoch += 1
        return self.epoch

    def statuses(self, keys: Sequence[StoreKey], tags: Tags) -> list[Status]:
        """An answer to a lookup."""
        rows = self._found(tags)
        hits = (rows >= 0).tolist()
        return [
            Status.HIT if hit else Status.PENDING if self._is_pending(key) else Status.MISS
            for key, hit in zip(keys, hits, strict=True)
        ]

    def payload_bytes(self, tags: Tags) -> list[int]:
        """How long the payload of each is, as it was written; 0 of one that is not there."""
        rows = self._found(tags)
        there = rows >= 0
        lengths = np.zeros(len(rows), np.int64)
        lengths[there] = self.index.records(rows[there])["raw_length"]
        return lengths.tolist()

    def use(self, tags: Tags) -> tuple[Rows, Records]:
        """Rows of these keys, and what is known of those that are there; counts as a use."""
        rows = self._found(tags)
        there = rows[rows >= 0]
        self.index.count_use(there)
        return rows, self.index.records(there)

    def claim(self, keys: Sequence[StoreKey], tags: Tags) -> list[Claim | None]:
        """A claim for each key that is neither there nor being written."""
        epoch = self.next_epoch()
        rows = self._found(tags)
        claims: list[Claim | None] = []
        for key, there in zip(keys, (rows >= 0).tolist(), strict=True):
            claim = None
            if not there and not self._is_pending(key):
                claim = self.pending[key] = Claim(key, epoch)
                self.claims.add(claim)
                self._claimed.setdefault(claim.tenant, Counter())[epoch] += 1
            claims.append(claim)
        return claims

    def forgotten_at(self, claim: Claim) -> int:
        """The epoch in which what is being written was discarded or purged; 0: it was not."""
        purged = self.purged.get(claim.tenant, 0)
        return max(claim.discarded, purged if claim.epoch < purged else 0)

    def release(self, claim: Claim) -> None:
        """The write is over, one way or the other."""
        if claim in self.claims:
            self.claims.discard(claim)
            epochs = self._claimed[claim.tenant]
            epochs[claim.epoch] -= 1
            if not epochs[claim.epoch]:
                del epochs[claim.epoch]
            if not epochs:
                del self._claimed[claim.tenant]
        if self.pending.get(claim.key) is claim:
            del self.pending[claim.key]

    def publish(self, segment: Segment, entries: Entries, tags: Tags) -> None:
        """Records that are on disk now are found from now on. Their keys are not there."""
        self.index.insert(records_of(entries, tags, segment.number))
        self.segments.count(segment, len(entries))

    def settle(self, extent: Extent, landed: Entries | None) -> Segment | None:
        """Gives an extent back; the segment if it is to be sealed now, which the caller does."""
        segment = extent.segment
        segment.in_flight -= 1
        if landed is None:
            self.segments.owe(segment)  # some of it may be on disk, where a scan would find it
        else:
            segment.landed.append(landed)
            forgets = landed["epoch"][landed["kind"] != Kind.RECORD]
            self.segments.note_forget(segment, int(forgets.max(initial=0)))
        return self.to_seal(segment)

    def to_seal(self, segment: Segment) -> Segment | None:
        """The segment, marked as being sealed, if it takes no more and nobody writes to it."""
        if not segment.retired or segment.in_flight or segment.evicting or segment.sealed:
            return None
        segment.in_flight += 1
        return segment

    def may_be_on_disk(self, key: StoreKey) -> bool:
        """Whether a record may be there that the index does not have: evicted, or about to be forgotten by others."""
        tenant = TenantId(key[:TENANT_ID_BYTES])
        return key in self.forgetting or tenant in self.purging or self.segments.owes(tenant)

    def begin_forgetting(self, keys: Sequence[StoreKey]) -> None:
        """A tombstone is to be written for each of these keys, followed by `end_forgetting`."""
        self.forgetting.update(keys)
        self.num_forgetting += len(keys)

    def end_forgetting(self, keys: Sequence[StoreKey]) -> None:
        """Their tombstones are written, or what they forget is gone, as far as that could be."""
        for key in keys:  # not `-=`, which looks at all that are being forgotten
            self.forgetting[key] -= 1
            if not self.forgetting[key]:
                del self.forgetting[key]
        self.num_forgetting -= len(keys)

    def take_out(self, rows: Rows) -> None:
        """Forgets records, each row once."""
        numbers, counts = np.unique(self.index.records(rows)["segment"], return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            segment = self.segments.find(number)
            if segment is None:
                raise InvariantError(f"disk index: a record is in segment {number}, which is not there")
            self.segments.count(segment, -count)
        self.index.remove(rows)

    def rows_of(self, tenant: TenantId, before: tuple[int, int], start: int, stop: int) -> Rows:
        """The rows of the tenant's records among the index's rows from `start` to `stop`.

        :param before: `SegmentSet.end_of` of a moment ago: what is written since is not meant.
        """
        rows = self.index.live_between(start, stop)
        records = self.index.records(rows)
        numbers, which = np.unique(records["segment"], return_inverse=True)
        segments = [self.segments.find(number) for number in numbers.tolist()]
        of_tenant = np.array([s is not None and s.id.tenant == tenant for s in segments], bool)
        is_older = (records["segment"] < before[0]) | (
            (records["segment"] == before[0]) & (records["page"] < before[1])
        )
        found: Rows = rows[of_tenant[which] & is_older]
        return found

    def rows_at(self, segment: int, entries: Entries, tags: Tags) -> Rows:
        """The row of each record if the index has it at this very place, else -1."""
        rows = self.index.find(tags)
        there = np.flatnonzero(rows >= 0)
        records = self.index.records(rows[there])
        elsewhere = (records["segment"] != segment) | (records["page"] != entries["page"][there])
        rows[there[elsewhere]] = -1
        return rows

    def has_writes(self, tenant: TenantId) -> bool:
        """Whether somebody writes a record of the tenant."""
        return tenant in self._claimed

    def needs_forgets(self, segment: Segment) -> bool:
        """Whether a tombstone in it may still be needed: for a record on disk elsewhere, or on its way there."""
        purged = self.purges_written.get(segment.id.tenant, 0)
        return segment.last_forget >= purged and segment.last_forget > self.first_epoch(segment.id.tenant, segment)

    def first_epoch(self, tenant: TenantId, but: Segment) -> int:
        """The smallest of any record of the tenant outside a segment, dead or on its way there too."""
        on_the_way = min(self._claimed.get(tenant, ()), default=NO_EPOCH)
        return min(self.segments.first_epoch(tenant, but)[0], on_the_way)

    def next_dead(self, tenant: TenantId) -> Segment | None:
        """A segment without a record that may go, marked; None without one. Tombstones that are needed keep theirs."""
        segments = self.segments
        idle = not segments.num_blocks_of(tenant) and not self.has_writes(tenant)
        oldest_forgets = segments.first_empty(tenant, open_too=idle)
        # If its tombstones are needed, so are those of all others, but perhaps of the one that has the oldest record.
        oldest_record = segments.find(segments.first_epoch(tenant)[1])
        for segment in (oldest_forgets, oldest_record):
            if segment is not None and segments.is_unused(segment, open_too=idle) and not self.needs_forgets(segment):
                return segments.mark(segment)
        return None

    def check(self, capacity_bytes: int) -> None:
        """Raises `InvariantError` when the books do not add up. O(records)."""
        self.index.check()
        self.segments.check(len(self.index))
        if self.segments.used_bytes > capacity_bytes and not any(segment.is_stuck for segment in self.segments):
            raise InvariantError(f"disk segments: {self.segments.used_bytes} bytes in use exceed the capacity")
        num_claimed = sum(epochs.total() for epochs in self._claimed.values())
        if not set(self.pending.values()) <= self.claims or num_claimed != len(self.claims):
            raise InvariantError("disk tier: a write under way is not known")

    def _is_pending(self, key: StoreKey) -> bool:
        claim = self.pending.get(key)
        return claim is not None and not self.forgotten_at(claim)

    def _found(self, tags: Tags) -> Rows:
        return np.full(len(tags), -1, np.int64) if self.off else self.index.find(tags)


def records_of(entries: Entries, tags: Tags, segment: int) -> Records:
    """What the index keeps of records that are in a segment."""
    records = np.zeros(len(entries), RECORD)
    headers = entries["header"]
    records["tag"], records["segment"], records["page"] = tags, segment, entries["page"]
    for field in ("checksum", "stored_length", "raw_length", "key_id"):
        records[field] = headers[field]
    records["form"] = headers["version"] << VERSION_SHIFT | headers["codec"]
    return records


def tagged(state: LogState, entries: Entries) -> tuple[list[StoreKey], Tags]:
    """Keys and tags of entries."""
    keys = keys_of(entries)
    return keys, state.tags(keys)


def switch_off(state: LogState, events: EventQueue) -> None:
    """Lets nothing be found any more, and tells so. Takes the lock."""
    with state.lock:
        state.off = True
        events.post(EventKind.CLEARED)
