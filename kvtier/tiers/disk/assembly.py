"""Puts a disk tier together: its medium, its books, and what reads, writes and forgets."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.metrics import Metrics
from kvtier.tiers.common.event_queue import EventQueue
from kvtier.tiers.common.packer import BlockPacker
from kvtier.tiers.disk.log.buffers import Buffers
from kvtier.tiers.disk.log.parts import BatchThreads
from kvtier.tiers.disk.log.reading import BlockReader
from kvtier.tiers.disk.medium.files import FileLayer
from kvtier.tiers.disk.medium.folder import DiskFolder
from kvtier.tiers.disk.medium.health import MediumHealth
from kvtier.tiers.disk.medium.io_threads import IoThreads
from kvtier.tiers.disk.medium.watch import HangWatch
from kvtier.tiers.disk.medium.watched_files import WatchedFiles
from kvtier.tiers.disk.operations.appending import SegmentLog
from kvtier.tiers.disk.operations.read_path import ReadPath
from kvtier.tiers.disk.operations.tombstones import Tombstones
from kvtier.tiers.disk.operations.write_path import WritePath
from kvtier.tiers.disk.operations.writing import BlockWriter
from kvtier.tiers.disk.options import DiskOptions
from kvtier.tiers.disk.reclaim.compaction import Compactor
from kvtier.tiers.disk.reclaim.space import SpaceManager
from kvtier.tiers.disk.state.log_state import LogState
from kvtier.tiers.disk.state.segment_files import SegmentFiles


@dataclass(frozen=True, slots=True)
class DiskParts:
    """The parts that a disk tier hands its calls on to. Any thread."""

    state: LogState
    watch: HangWatch
    health: MediumHealth
    events: EventQueue
    files: SegmentFiles
    buffers: Buffers
    space: SpaceManager
    log: SegmentLog
    tombstones: Tombstones
    read_path: ReadPath
    write_path: WritePath
    threads: Sequence[IoThreads]
    """The threads for reads, for writes, for tombstones and for `shrinking`: a read is not to wait behind all of a
    large batch of writes."""
    shrinking: IoThreads
    """The one thread that removes what tenants have above their caps, however long that takes."""


def assemble(
    folder: DiskFolder, files: FileLayer, options: DiskOptions, name: str, events: EventQueue, metrics: Metrics
) -> DiskParts:
    """Makes the parts, without I/O. The folder stays the caller's.

    :param events: flushed by whoever turns the tier off, and on again.
    """

    def note_hang(reason: str | None) -> None:
        """Called on any thread, without a lock of the tier's."""
        health.hangs(reason)
        events.flush()

    threads = [IoThreads(options.num_threads, f"kvtier-{name}{kind}") for kind in ("", "-write", "-forget")]
    reads, writes, forgets = threads
    shrinking = IoThreads(1, f"kvtier-{name}-shrink")
    health = MediumHealth(name, metrics, events)
    watch = HangWatch(options.timeout_s, note_hang)
    state, buffers = LogState(), Buffers(2 * options.num_threads)
    watched = WatchedFiles(files, watch)
    segment_files = SegmentFiles(folder, watched, state, buffers, health, options.sync)
    compactor = Compactor(
        state,
        segment_files,
        buffers,
        events,
        health,
        metrics,
        name=name,
        write_amplification=options.write_amplification,
    )
    space = SpaceManager(
        state,
        segment_files,
        compactor,
        events,
        health,
        capacity_bytes=options.capacity_bytes,
        reserve_bytes=options.reserve_bytes,
    )
    log = SegmentLog(state, segment_files, space, options.segment_bytes, options.capacity_bytes)
    tombstones = Tombstones(state, log, space, events, health, watch, forgets)
    packer = BlockPacker(options.codec, tier=name, metrics=metrics, seals=options.seals)
    reader = BlockReader(segment_files.read, buffers, packer, direct=watched.direct)
    read_path = ReadPath(state, tombstones, events, health, reader, BatchThreads(reads, watch))
    new_bytes = metrics.disk_bytes.labels(name, "new")
    writer = BlockWriter(state, log, tombstones, events, health, new_bytes, packer)
    part_bytes = log.segment_bytes // 4
    write_path = WritePath(state, events, health, writer, BatchThreads(writes, watch), part_bytes=part_bytes)
    return DiskParts(
        state,
        watch,
        health,
        events,
        segment_files,
        buffers,
        space,
        log,
        tombstones,
        read_path,
        write_path,
        [*threads, shrinking],
        shrinking,
    )
