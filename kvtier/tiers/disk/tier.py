"""The disk tier: a log of segments on a local file system (`kvtier.tiers.disk.log`)."""

import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from kvtier.codec.sealed_form import NO_SEALS, StorageSeals
from kvtier.codec.stored_form import Codec
from kvtier.errors import ConfigError
from kvtier.events import EventSink, TierState, ignore_event
from kvtier.identity.keys import StoreKey, TenantId
from kvtier.memory.buffers import ReadableBuffer
from kvtier.metrics import Metrics
from kvtier.tiers.base import Item, Status, Usage, WriteStatus, require_pairs
from kvtier.tiers.common.call_guard import CallGuard
from kvtier.tiers.common.event_queue import EventQueue
from kvtier.tiers.common.lent_memory import LentMemory
from kvtier.tiers.common.shares import Share
from kvtier.tiers.disk.assembly import DiskParts, assemble
from kvtier.tiers.disk.medium.direct_io import DirectIo, goes_direct
from kvtier.tiers.disk.medium.files import FileLayer, OsFiles
from kvtier.tiers.disk.medium.folder import DiskFolder
from kvtier.tiers.disk.medium.io_threads import IoThreads
from kvtier.tiers.disk.operations.recovery import recover, take_over
from kvtier.tiers.disk.operations.writing import sort_out
from kvtier.tiers.disk.options import DiskOptions
from kvtier.tiers.disk.state.segment_files import SyncPolicy

_log = logging.getLogger(__name__)


class DiskTier:
    """Blocks in segments: append-only files, each of one tenant, with an index in memory that a start rebuilds.

    Every read is verified against the key that was asked for. What is acknowledged outlives the process, however it
    ends; what a loss of power may take is what `DiskOptions.sync` says. Discards outlive the process in the same way.

    Eviction takes the oldest segment of the tenant that has most beyond what it is owed (`set_shares`), and writes
    blocks that were read since they were written once more, the most read first, within `write_amplification`.

    Failures of the disk are answers (MISS, FULL, FAILED), counted in `Metrics.io_errors` and `corrupt_blocks`, and
    logged at most twice a minute. A corrupt block is dropped. When one write after another fails, the tier is read-only
    but for a try every few seconds; when one read after another does, or the folder is removed or replaced, it is off:
    everything misses. Both are events, and in `state`.

    While the disk hangs, the tier is off, and forgets nothing: calls that come are answered MISS or FAILED at once,
    until the operations that hung have ended. Reads and writes that were under way end with MISS or FAILED as well:
    with lent memory when an operation has taken longer than it may, without it when the disk has answered, since it
    uses the caller's buffers until then.

    Disk space of all files never exceeds the capacity: room is made before a file is, and counted as free only when
    the victim's file is gone. Reads hold no victim back. A start with less capacity than before, where files cannot be
    removed, takes no writes until they can.

    Any thread. Large batches are read and written in parallel by a few I/O threads.
    """

    def __init__(self, folder: DiskFolder, parts: DiskParts, capacity_bytes: int, name: str) -> None:
        """Makes a tier for `open`, which owns `folder` and what it is put together of from now on."""
        self._folder = folder
        self._parts = parts
        self._capacity_bytes = capacity_bytes
        self._name = name
        self._guard = CallGuard(f"tier {name}")
        self._closing = False
        """Set once, by `close`: `_shrink` ends then."""

    @classmethod
    def open(  # noqa: PLR0913 - what may be set, by keyword
        cls,
        directory: str | os.PathLike[str],
        capacity_bytes: int,
        *,
        name: str = "disk",
        on_event: EventSink = ignore_event,
        metrics: Metrics | None = None,
        files: FileLayer | None = None,
        reserve_bytes: int = 2**30,
        segment_bytes: int = 64 * 2**20,
        sync: SyncPolicy = SyncPolicy.NONE,
        direct_io: DirectIo = DirectIo.AUTO,
        codec: Codec = Codec.RAW,
        seals: StorageSeals = NO_SEALS,
        write_amplification: float = 1.3,
        num_threads: int = 4,
        timeout_s: float = 5.0,
    ) -> "DiskTier":
        """Takes a folder, finds the blocks in it, and evicts what exceeds the capacity.

        Raises `ConfigError` when the folder cannot be used: in use by another process, not writable, of another
        format, or not empty and not made by a disk tier.

        :param directory: a folder of its own, made if missing, on a local file system.
        :param capacity_bytes: disk space for all files.
        :param on_event: called from the threads that use the tier, and with the keys found here; must
            not call `close`.
        :param files: file operations instead of the real ones.
        :param reserve_bytes: free space that the tier leaves to others on the file system; below it, the
            tier shrinks. Too small, and neighbours see a full disk.
        :param segment_bytes: size of a segment, at most a sixteenth of the capacity. Small: more files and footers.
            Large: eviction takes more at once. Several tenants have smaller ones, a sixteenth of their fair share.
        :param sync: what outlives a loss of power; a killed process loses nothing it acknowledged, whatever this is.
        :param direct_io: whether payloads go past the page cache, where they would be kept twice.
        :param codec: how blocks are written; those that are there already are read whatever theirs is. `LZ4`
            saves a fifth of the space of bf16 KV, `PLANES_ZSTD` three tenths, and time where the drive is slow
            (`kvtier bench codec`).
        :param seals: the tenants whose blocks are sealed. What cannot be opened is a miss, and dropped.
        :param write_amplification: bytes of records written per byte asked for, at the most: the share above 1 keeps
            blocks that were read.
        :param num_threads: reads on their way at once, and writes. One gives half the bandwidth of most disks.
        :param timeout_s: seconds that one operation of the medium may take, such as a read of 4 MiB; then it hangs.
            Small: a drive that is merely busy counts as hung, and misses for a moment. Large: so long do callers wait
            for one that hangs, with lent memory.
        """
        options = DiskOptions(
            capacity_bytes=capacity_bytes,
            reserve_bytes=reserve_bytes,
            segment_bytes=segment_bytes,
            sync=sync,
            codec=codec,
            seals=seals,
            write_amplification=write_amplification,
            num_threads=num_threads,
            timeout_s=timeout_s,
        )
        options.check()
        metrics = metrics if metrics is not None else Metrics()
        folder = DiskFolder.open(Path(directory))
        tier: DiskTier | None = None
        try:
            layer = files if files is not None else OsFiles(direct=goes_direct(folder.path, direct_io))
            parts = assemble(folder, layer, options, name, EventQueue(name, on_event), metrics)
            tier = cls(folder, parts, capacity_bytes, name)
            tier._start(num_threads, metrics, tell=on_event is not ignore_event)
        except BaseException as error:
            if tier is not None:
                tier._release()
            else:
                folder.close()
            if isinstance(error, OSError):
                raise ConfigError(f"disk tier folder {folder.path} cannot be read or written: {error}") from error
            raise
        return tier

    @property
    def name(self) -> str:
        return self._name

    @property
    def state(self) -> TierState:
        """What its medium lets it do at this moment; changes are events, too."""
        self._parts.watch.hangs()
        return self._parts.health.state

    def problem(self) -> str | None:
        """Why it is not `WRITABLE`, in words; None when it is. Never waits."""
        self._parts.watch.hangs()
        return self._parts.health.problem

    def lookup(self, keys: Sequence[StoreKey]) -> list[Status]:
        """Answers from memory with a status per key, in order. Does not count as a use for eviction."""
        if self._parts.watch.hangs():
            return [Status.MISS] * len(keys)
        tags = self._parts.state.tags(keys)
        with self._guard, self._parts.state.lock:
            return self._parts.state.statuses(keys, tags)

    def payload_bytes(self, keys: Sequence[StoreKey]) -> list[int]:
        """Answers from memory how long the payload of each is that a read would copy; 0 of one that is not there."""
        if self._parts.watch.hangs():
            return [0] * len(keys)
        tags = self._parts.state.tags(keys)
        with self._guard, self._parts.state.lock:
            return self._parts.state.payload_bytes(tags)

    def read(
        self, keys: Sequence[StoreKey], into: Sequence[memoryview], lent: LentMemory | None = None
    ) -> list[Status]:
        """Copies the payload of `keys[i]` from disk over all of `into[i]`; a status per key, in order.

        :param lent: `into` may be used until `lent.when_done`, so a disk that hangs is not waited for.
        """
        require_pairs(keys, into)
        used = lent if lent is not None else LentMemory()
        try:
            with self._guard:
                statuses = self._parts.read_path.read(keys, into, used)
                self._parts.events.flush()
        finally:
            if lent is None:
                used.wait()  # outside the guard: `close` does not wait for it
        return statuses

    def write(self, items: Sequence[Item[ReadableBuffer]], lent: LentMemory | None = None) -> list[WriteStatus]:
        """Stores payloads; a status per block, in order. Raises what a payload raises that is not contiguous bytes; the
        others are stored. A block that is FAILED may be there later: it was being written when the medium hung.

        :param lent: payloads may be used until `lent.when_done`, so a disk that hangs is not waited for.
        """
        sound, errors = sort_out(items)
        used = lent if lent is not None else LentMemory()
        try:
            with self._guard:
                statuses = self._parts.write_path.write(sound, errors, used)
                self._parts.events.flush()
        finally:
            if lent is None:
                used.wait()  # outside the guard: `close` does not wait for it
        if errors:
            raise errors[0]
        return statuses

    def discard(self, keys: Sequence[StoreKey]) -> int:
        """Forgets these keys, also for later processes, and returns how many were there. A key being written is
        forgotten when its write ends."""
        tags = self._parts.state.tags(keys)
        with self._guard:
            num_there = self._parts.tombstones.discard(keys, tags)
            self._parts.events.flush()
            return num_there

    def drop(self, keys: Sequence[StoreKey]) -> None:
        """Forgets blocks that have turned out bad. Unlike `discard`, it removes no segment with others in it: where it
        cannot be written down, a later process finds them again."""
        state = self._parts.state
        tags = state.tags(keys)
        with self._guard:
            with state.lock:
                rows = state.index.find(tags)
                records = state.index.records(rows[rows >= 0])
            there = [key for key, row in zip(keys, rows.tolist(), strict=True) if row >= 0]
            places = zip(there, records["segment"].tolist(), records["page"].tolist(), strict=True)
            self._parts.tombstones.drop(list(places))
            self._parts.events.flush()

    def purge(self, tenant: TenantId) -> int:
        """Forgets all blocks of a tenant; returns how many were there. Its files are gone on return."""
        with self._guard:
            num_there = self._parts.tombstones.purge(tenant)
            self._parts.buffers.give_back()
            self._parts.events.flush()
            return num_there

    @property
    def most_bytes(self) -> int:
        """Bytes that all files may take, by the capacity and by what the file system last had. Takes no lock."""
        return self._parts.space.most_bytes

    def usage(self) -> Usage:
        """Returns how full the tier is; bytes are disk space of all files, preallocated room included.

        The capacity is no more than the file system had room for when room was last made.
        """
        with self._guard, self._parts.state.lock:
            state, most_bytes = self._parts.state, self._parts.space.most_bytes
            return Usage(len(state.index), state.segments.used_bytes, max(state.segments.used_bytes, most_bytes))

    def usage_of(self, tenant: TenantId) -> Usage:
        """One tenant's part of `usage`: bytes are those of pages that were written for it, with heads, padding, and
        blocks that are gone and not cleared away yet, but without preallocated room."""
        with self._guard, self._parts.state.lock:
            segments = self._parts.state.segments
            return Usage(segments.num_blocks_of(tenant), segments.taken_bytes_of(tenant), self._capacity_bytes)

    def set_shares(self, shares: Mapping[TenantId, Share]) -> None:
        """What these tenants are owed from now on; all others have equal shares. The change is made at once for all.

        Bytes are those of `usage_of`. What others have of a tenant's guarantee goes, oldest segments first, as the
        tenant writes. What it has above its cap goes likewise, from now on, on a thread of its own, and as it writes.
        Raises `InvalidInputError`, and changes nothing, when more would be guaranteed than there is.
        """
        with self._guard:
            with self._parts.state.lock:
                self._parts.state.segments.set_shares(shares, self._capacity_bytes)
                above = self._parts.state.segments.above_caps()
            if above:
                self._parts.shrinking.submit(partial(self._shrink, above))

    def write_amplification(self) -> float:
        """Bytes of records written since the start, per byte that somebody asked to be written."""
        with self._guard, self._parts.state.lock:
            return 1 + self._parts.state.moved_bytes / max(1, self._parts.state.new_bytes)

    def check(self) -> None:
        """Verifies the bookkeeping, but not the files, as `kvtier fsck` does; raises `InvariantError`."""
        with self._guard, self._parts.state.lock:
            self._parts.state.check(self._capacity_bytes)

    def hurry(self, timeout_s: float) -> None:
        """Called before a close: lowers the time that an operation of the medium may take to `timeout_s` if longer."""
        self._parts.watch.hurry(timeout_s)

    def close(self) -> None:
        """Waits for calls in flight, seals what is open and ends the threads. The blocks stay on disk for the next
        `open`. Idempotent.

        While the medium hangs, that is left to a thread which does it when the medium answers, if the process lives
        so long: until then nobody else can have the folder, and calls without lent memory wait on.
        """
        if self._guard.close():
            self._closing = True
            closing = IoThreads(1, f"kvtier-{self._name}-close")
            closed = closing.submit(self._end)
            hangs = self._parts.watch.wait([closed])
            closing.close(wait=not hangs)
            if hangs:
                _log.warning(
                    "tier %s is left as it is: %s",
                    self._name,
                    self._parts.health.problem,
                    extra={"tier": self._name},
                )
            else:
                closed.result()

    def _start(self, num_threads: int, metrics: Metrics, *, tell: bool) -> None:
        """Takes over what the folder holds, the oldest segments evicted down to the capacity."""
        parts = self._parts
        with ThreadPoolExecutor(num_threads, thread_name_prefix=f"kvtier-{self._name}-start") as threads:
            found = recover(self._folder, parts.files, parts.state, threads)
        take_over(found, self._name, parts.space, parts.events, metrics, tell=tell)

    def _shrink(self, tenants: Sequence[TenantId]) -> None:
        """Removes what these tenants have above their caps."""
        for tenant in tenants:
            more = True
            while more and not self._closing:
                more = self._parts.space.shrink(tenant)
                self._parts.events.flush()

    def _end(self) -> None:
        """Seals what is open, and gives everything back."""
        self._parts.log.retire_all()
        self._release()

    def _release(self) -> None:
        for threads in self._parts.threads:
            threads.close()
        self._parts.files.close()
        with self._parts.watch.operation("close"):
            self._folder.close()
