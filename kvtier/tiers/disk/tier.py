"""The disk tier: a log of segments on a local file system (`kvtier.tiers.disk.log`)."""

import logging
import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kvtier.codec.stored_form import Codec
from kvtier.errors import ConfigError, InvalidInputError
from kvtier.events import EventKind, EventSink, TierState, ignore_event
from kvtier.identity.keys import StoreKey, TenantId
from kvtier.memory.buffers import ReadableBuffer
from kvtier.metrics import Metrics
from kvtier.tiers.base import Item, Status, Usage, WriteStatus, require_pairs
from kvtier.tiers.common.call_guard import CallGuard
from kvtier.tiers.common.event_queue import EventQueue
from kvtier.tiers.common.packer import BlockPacker
from kvtier.tiers.disk.log.buffers import Buffers
from kvtier.tiers.disk.log.parts import in_parallel
from kvtier.tiers.disk.log.reading import Answer, BlockReader, Wanted, runs_of
from kvtier.tiers.disk.medium.direct_io import DirectIo, goes_direct
from kvtier.tiers.disk.medium.files import FileLayer, OsFiles
from kvtier.tiers.disk.medium.folder import DiskFolder
from kvtier.tiers.disk.medium.health import MediumHealth
from kvtier.tiers.disk.operations.appending import SMALLEST_SEGMENT_BYTES, SegmentLog
from kvtier.tiers.disk.operations.read_path import ReadPath
from kvtier.tiers.disk.operations.recovery import recover
from kvtier.tiers.disk.operations.tombstones import Tombstones
from kvtier.tiers.disk.operations.writing import BlockWriter, parts_of, sort_out
from kvtier.tiers.disk.reclaim.compaction import Compactor
from kvtier.tiers.disk.reclaim.space import SpaceManager
from kvtier.tiers.disk.state.log_state import LogState
from kvtier.tiers.disk.state.segment_files import SegmentFiles, SyncPolicy
from kvtier.tiers.disk.state.tag_table import Tags


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """How a disk tier works. `DiskTier.open` documents the fields and has the defaults."""

    reserve_bytes: int
    segment_bytes: int
    sync: SyncPolicy
    codec: Codec
    write_amplification: float
    num_threads: int


class DiskTier:
    """Blocks in segments: append-only files, each of one tenant, with an index in memory that a start rebuilds.

    Every read is verified against the key that was asked for. What is acknowledged outlives the process, however it
    ends; what a loss of power may take is what `DiskOptions.sync` says. Discards outlive the process in the same way.

    Eviction takes the oldest segment of the tenant that has most, and writes blocks that were read since they were
    written once more, the most read first, within `write_amplification`.

    Failures of the disk are answers (MISS, FULL, FAILED), counted in `Metrics.io_errors` and `corrupt_blocks`, and
    logged at most twice a minute. A corrupt block is dropped. When one write after another fails, the tier is read-only
    but for a try every few seconds; when one read after another does, it is off: everything misses. Both are events,
    and in `state`.

    Disk space of all files never exceeds the capacity: room is made before a file is, and counted as free only when
    the victim's file is gone. Reads hold no victim back. A start with less capacity than before, where files cannot be
    removed, takes no writes until they can.

    Any thread. Large batches are read and written in parallel by a few I/O threads.
    """

    def __init__(  # noqa: PLR0913 - what may be set, by keyword
        self,
        folder: DiskFolder,
        files: FileLayer,
        capacity_bytes: int,
        options: DiskOptions,
        *,
        name: str,
        on_event: EventSink,
        metrics: Metrics,
    ) -> None:
        """Makes a tier for `open`, without I/O; the tier owns `folder` from now on."""
        self._folder = folder
        self._name = name
        self._capacity_bytes = capacity_bytes
        self._metrics = metrics
        self._on_event = on_event
        self._reads = ThreadPoolExecutor(options.num_threads, thread_name_prefix=f"kvtier-{name}")
        self._writes = ThreadPoolExecutor(options.num_threads, thread_name_prefix=f"kvtier-{name}-write")
        """Threads for writes alone: a read is not to wait behind all of a large batch that is being written."""
        self._guard = CallGuard(f"tier {name}")
        self._events = EventQueue(name, on_event)
        self._health = MediumHealth(name, metrics, self._events, logging.getLogger(__name__))
        self._state = LogState()
        buffers = Buffers(2 * options.num_threads)
        self._files = SegmentFiles(folder, files, self._state, buffers, self._health, options.sync)
        compactor = Compactor(
            self._state,
            self._files,
            buffers,
            self._events,
            self._health,
            metrics,
            name=name,
            write_amplification=options.write_amplification,
        )
        self._space = SpaceManager(
            self._state,
            self._files,
            compactor,
            self._events,
            self._health,
            capacity_bytes=capacity_bytes,
            reserve_bytes=options.reserve_bytes,
        )
        self._log = SegmentLog(self._state, self._files, self._space, options.segment_bytes, capacity_bytes)
        self._tombstones = Tombstones(self._state, self._log, self._space, self._events, self._health)
        packer = BlockPacker(options.codec, tier=name, metrics=metrics)
        self._reader = BlockReader(self._files.read, buffers, direct=files.direct)
        self._read_path = ReadPath(self._state, self._tombstones, self._events, self._health)
        new_bytes = metrics.disk_bytes.labels(name, "new")
        self._writer = BlockWriter(
            self._state, self._log, self._tombstones, self._events, self._health, new_bytes, packer
        )
        self._part_bytes = self._log.segment_bytes // 4

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
        write_amplification: float = 1.3,
        num_threads: int = 4,
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
        :param write_amplification: bytes of records written per byte asked for, at the most: the share above 1 keeps
            blocks that were read.
        :param num_threads: reads on their way at once, and writes. One gives half the bandwidth of most disks.
        """
        options = DiskOptions(reserve_bytes, segment_bytes, sync, codec, write_amplification, num_threads)
        _check(capacity_bytes, options)
        folder = DiskFolder.open(Path(directory))
        tier: DiskTier | None = None
        try:
            layer = files if files is not None else OsFiles(direct=goes_direct(folder.path, direct_io))
            tier = cls(
                folder,
                layer,
                capacity_bytes,
                options,
                name=name,
                on_event=on_event,
                metrics=metrics if metrics is not None else Metrics(),
            )
            tier._start()
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
        return self._health.state

    def lookup(self, keys: Sequence[StoreKey]) -> list[Status]:
        """Answers from memory with a status per key, in order. Does not count as a use for eviction."""
        tags = self._state.tags(keys)
        with self._guard, self._state.lock:
            return self._state.statuses(keys, tags)

    def read(self, keys: Sequence[StoreKey], into: Sequence[memoryview]) -> list[Status]:
        """Copies the payload of `keys[i]` from disk over all of `into[i]`; a status per key, in order."""
        require_pairs(keys, into)
        with self._guard:
            statuses = self._read_path.read(keys, into, self._read_blocks)
            self._events.flush()
        return statuses

    def write(self, items: Sequence[Item[ReadableBuffer]]) -> list[WriteStatus]:
        """Stores payloads; a status per block, in order. Raises what a payload raises that is not contiguous bytes; the
        others are stored."""
        sound, errors = sort_out(items)
        with self._guard:
            statuses = self._store(sound, errors)
            self._events.flush()
        if errors:
            raise errors[0]
        return statuses

    def discard(self, keys: Sequence[StoreKey]) -> int:
        """Forgets these keys, also for later processes, and returns how many were there. A key being written is
        forgotten when its write ends."""
        tags = self._state.tags(keys)
        with self._guard:
            num_there = self._tombstones.discard(keys, tags)
            self._events.flush()
            return num_there

    def purge(self, tenant: TenantId) -> int:
        """Forgets all blocks of a tenant; returns how many were there. Its files are gone on return."""
        with self._guard:
            num_there = self._tombstones.purge(tenant)
            self._events.flush()
            return num_there

    def usage(self) -> Usage:
        """Returns how full the tier is; bytes are disk space of all files, preallocated room included."""
        with self._guard, self._state.lock:
            return Usage(len(self._state.index), self._state.segments.used_bytes, self._capacity_bytes)

    def usage_of(self, tenant: TenantId) -> Usage:
        """One tenant's part of `usage`."""
        with self._guard, self._state.lock:
            segments = self._state.segments
            return Usage(segments.num_blocks_of(tenant), segments.bytes_of(tenant), self._capacity_bytes)

    def write_amplification(self) -> float:
        """Bytes of records written since the start, per byte that somebody asked to be written."""
        with self._guard, self._state.lock:
            return 1 + self._state.moved_bytes / max(1, self._state.new_bytes)

    def check(self) -> None:
        """Verifies the bookkeeping, but not the files, as `kvtier fsck` does; raises `InvariantError`."""
        with self._guard, self._state.lock:
            self._state.check(self._capacity_bytes)

    def close(self) -> None:
        """Waits for calls in flight, seals what is open and ends the threads. The blocks stay on disk for the next
        `open`. Idempotent."""
        if self._guard.close():
            self._log.retire_all()
            self._release()

    def _start(self) -> None:
        """Takes over what the folder holds, the oldest segments evicted down to the capacity."""
        found = recover(self._folder, self._files, self._state, self._reads)
        self._metrics.foreign_files.labels(self._name).inc(found.num_foreign)
        self._metrics.corrupt_blocks.labels(self._name).inc(found.num_damaged)
        self._metrics.torn_blocks.labels(self._name).inc(found.num_torn)
        if self._on_event is not ignore_event:
            for keys in found.events():
                self._events.post(EventKind.STORED, keys)
        for segment in found.unfinished:
            self._space.finish(segment)
        self._space.fit()
        for tenant in {segment.id.tenant for segment in list(self._state.segments)}:
            self._space.drop_dead(tenant)
        self._events.flush()

    def _release(self) -> None:
        self._reads.shutdown()
        self._writes.shutdown()
        self._files.close()
        self._folder.close()

    def _read_blocks(self, wanted: Sequence[Wanted]) -> Iterator[Answer]:
        """Runs of neighbours in parallel."""
        for part in in_parallel(self._reads, self._reader.read, runs_of(wanted)):
            yield from part

    def _store(self, items: Sequence[Item[ReadableBuffer]], errors: list[BaseException]) -> list[WriteStatus]:
        """An answer per item; `errors` gets what was raised for some, whose answers say nothing."""
        keys = [key for key, _, _ in items]
        tags = self._state.tags(keys)
        if self._state.off or not self._health.may_write():  # a stale look costs a failed write
            return self._refused(keys, tags)
        with self._state.lock:
            claims = self._state.claim(keys, tags)
        statuses = [WriteStatus.EXISTS] * len(items)
        work = [(i, claim, *items[i][1:]) for i, claim in enumerate(claims) if claim is not None]
        for part in in_parallel(self._writes, self._writer.store, parts_of(work, self._part_bytes)):
            for index, status in part:
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


def _check(capacity_bytes: int, options: DiskOptions) -> None:
    if (
        capacity_bytes < SMALLEST_SEGMENT_BYTES
        or options.reserve_bytes < 0
        or options.num_threads < 1
        or options.segment_bytes < SMALLEST_SEGMENT_BYTES
        or not 1 <= options.write_amplification < math.inf
    ):
        raise InvalidInputError(
            f"disk tier of {capacity_bytes} bytes, {options}: needs {SMALLEST_SEGMENT_BYTES} bytes, segments of as "
            "many, a thread, and a write amplification from 1"
        )
