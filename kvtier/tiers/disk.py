"""The disk tier: one file per block on a local file system."""

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

from kvtier.codec import HEADER_BYTES, Codec, encode, parse_stored_header, unpack, verify
from kvtier.errors import ConfigError, CorruptBlockError, InvalidInputError, InvariantError
from kvtier.events import EventKind, EventSink, ignore_event
from kvtier.keys import StoreKey, TenantId
from kvtier.metrics import Metrics
from kvtier.quiet_log import QuietLog
from kvtier.tiers.base import ReadableBuffer, Status, Usage, WriteStatus, require_pairs
from kvtier.tiers.disk_folder import DiskFolder
from kvtier.tiers.disk_index import DiskBlock, DiskIndex, footprint_bytes
from kvtier.tiers.files import FileLayer, OsFiles, supports_direct
from kvtier.tiers.gate import CallGate
from kvtier.tiers.memory import PAGE_BYTES, copy_bytes, map_memory, round_up
from kvtier.tiers.outbox import Outbox

_Answer = TypeVar("_Answer")
_NO_SPACE_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
_PASSING_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR)
"""What has nothing to do with the file. After any other error it cannot be read again: EIO, ENODATA (a bad sector),
EUCLEAN and EBADMSG (a file system that is broken), or something else that lies in its place."""


class _ThreadBuffer(threading.local):
    """One page-aligned buffer per I/O thread, as large as the largest file it met."""

    memory = memoryview(b"")

    def sized(self, nbytes: int) -> memoryview:
        """At least `nbytes`, whole pages."""
        needed = round_up(nbytes, PAGE_BYTES)
        if len(self.memory) < needed:
            self.memory = map_memory(needed, prefault=True)
        return self.memory[:needed]


class DiskTier:
    """Blocks in files of the stored form, verified against the key asked for on every read.

    What can be forgotten: a block is written under a temporary name and renamed when complete, so a
    process killed at any moment loses only writes that were not acknowledged. Nothing is flushed with
    fsync: when the machine itself goes down, the writes of the last seconds may be missing or torn;
    the checksum finds torn ones when they are read. The order of use is not stored: after a start, the
    blocks written longest ago are evicted first.

    Failures of the disk are answers (MISS, FULL, FAILED), counted in `Metrics.io_errors` and
    `corrupt_blocks`, and logged at most twice a minute. A corrupt block is dropped.

    Disk space of all files, in whole pages, never exceeds the capacity: room is made before a write,
    and counted as free only when the victim's file is gone. Reads hold no victim back: a block evicted
    during a read may be a miss.

    Any thread. The blocks of a batch are read and written in parallel by a few I/O threads.
    """

    def __init__(
        self,
        folder: DiskFolder,
        files: FileLayer,
        capacity_bytes: int,
        *,
        reserve_bytes: int,
        codec: Codec,
        name: str,
        on_event: EventSink,
        metrics: Metrics,
        num_threads: int,
    ) -> None:
        """For `open`, which documents the parameters. Does no I/O; the tier owns `folder` from now on."""
        self._folder = folder
        self._files = files
        self._name = name
        self._capacity_bytes = capacity_bytes
        self._reserve_bytes = reserve_bytes
        self._codec = codec
        self._metrics = metrics
        self._log = QuietLog(logging.getLogger(__name__))
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=f"kvtier-{name}")
        self._buffer = _ThreadBuffer()
        self._gate = CallGate(f"tier {name}")
        self._outbox = Outbox(name, on_event)
        self._lock = threading.Lock()
        self._index = DiskIndex()
        """Guarded by _lock."""

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        capacity_bytes: int,
        *,
        reserve_bytes: int = 2**30,
        codec: Codec = Codec.RAW,
        name: str = "disk",
        on_event: EventSink = ignore_event,
        metrics: Metrics | None = None,
        num_threads: int = 4,
        files: FileLayer | None = None,
    ) -> "DiskTier":
        """Takes a folder, finds the blocks in it, and evicts what exceeds the capacity.

        Raises `ConfigError` when the folder cannot be used: in use by another process, not writable, or
        not empty and not made by a disk tier.

        :param directory: a folder of its own, made if missing, on a local file system.
        :param capacity_bytes: disk space for blocks.
        :param reserve_bytes: free space that the tier leaves to others on the file system; below it, the
            tier shrinks. Too small, and neighbours see a full disk.
        :param codec: how blocks are written; those that are there already are read whatever theirs is. `LZ4`
            saves a fifth of the space of bf16 KV, and time where the drive gives less than about 0.5 GB/s
            (`kvtier bench codec`).
        :param on_event: called from the threads that use the tier, and with the keys found here; must
            not call `close`.
        :param num_threads: blocks on their way at once. One gives half the bandwidth of most disks.
        :param files: file operations; by default the real ones, with O_DIRECT where the file system can.
        """
        if capacity_bytes < PAGE_BYTES or reserve_bytes < 0 or num_threads < 1:
            raise InvalidInputError(
                f"disk tier of {capacity_bytes} bytes, {reserve_bytes} in reserve, {num_threads} threads: too small"
            )
        folder = DiskFolder.open(Path(directory))
        try:
            tier = cls(
                folder,
                files if files is not None else OsFiles(direct=supports_direct(folder.temp_folder)),
                capacity_bytes,
                reserve_bytes=reserve_bytes,
                codec=codec,
                name=name,
                on_event=on_event,
                metrics=metrics if metrics is not None else Metrics(),
                num_threads=num_threads,
            )
            tier._adopt()
        except OSError as error:
            folder.close()
            raise ConfigError(f"disk tier folder {folder.path} cannot be read or written: {error}") from error
        return tier

    @property
    def name(self) -> str:
        return self._name

    def lookup(self, keys: Sequence[StoreKey]) -> list[Status]:
        """See `Tier.lookup`. Answers from memory."""
        with self._gate, self._lock:
            blocks = [self._index.find(key) for key in keys]
        return [Status.MISS if b is None else Status.HIT if b.ready else Status.PENDING for b in blocks]

    def read(self, keys: Sequence[StoreKey], into: Sequence[memoryview]) -> list[Status]:
        """See `Tier.read`. The batch's last block becomes the coldest of it, as tails should."""
        require_pairs(keys, into)
        with self._gate:
            with self._lock:
                found = [self._index.use(key) for key in reversed(keys)]
            found.reverse()
            answers = self._run(self._load, keys, found, into)
            self._outbox.flush()
            return [answer.result() for answer in answers]

    def write(self, items: Sequence[tuple[StoreKey, ReadableBuffer]]) -> list[WriteStatus]:
        """See `Tier.write`. The batch's last block becomes the coldest of it, as tails should."""
        with self._gate:
            with self._lock:
                claims = [self._index.claim(key) for key, _ in items]
            answers = self._run(self._store, claims, items)
            self._finish(
                [
                    (key, block, WriteStatus.FAILED if answer.exception() else answer.result())
                    for (key, _), block, answer in zip(items, claims, answers, strict=True)
                    if block is not None
                ]
            )
            self._outbox.flush()
            return [answer.result() for answer in answers]

    def discard(self, keys: Sequence[StoreKey]) -> int:
        """See `Tier.discard`. A key being written is forgotten when its write ends."""
        with self._gate:
            with self._lock:
                taken = [(key, block) for key in keys if (block := self._index.take_out(key)) is not None]
                ready = [(key, block) for key, block in taken if block.ready]
                self._outbox.post(EventKind.REMOVED, [key for key, _ in ready])
            for key, block in ready:
                self._remove_file(key, block)
            self._outbox.flush()
            return len(ready)

    def usage(self) -> Usage:
        """See `Tier.usage`: bytes are disk space in whole pages, room set aside for writes included."""
        with self._gate, self._lock:
            return Usage(self._index.num_ready, self._index.used_bytes, self._capacity_bytes)

    def usage_of(self, tenant: TenantId) -> Usage:
        """One tenant's part of `usage`."""
        with self._gate, self._lock:
            return Usage(*self._index.usage_of(tenant), self._capacity_bytes)

    def check(self) -> None:
        """See `Tier.check`. Looks at the bookkeeping, not at the files."""
        with self._gate, self._lock:
            self._index.check()
            if self._index.used_bytes > self._capacity_bytes:
                raise InvariantError(f"tier {self._name}: {self._index.used_bytes} bytes in use exceed the capacity")

    def close(self) -> None:
        """See `Tier.close`. The blocks stay on disk for the next `open`."""
        if self._gate.close():
            self._executor.shutdown()
            self._folder.close()

    def _adopt(self) -> None:
        """Takes over what the folder holds, newest file of each key, coldest evicted down to the capacity."""
        scan = self._folder.scan()
        if scan.num_foreign:
            self._metrics.foreign_files.labels(self._name).inc(scan.num_foreign)
        if scan.torn:
            self._metrics.corrupt_blocks.labels(self._name).inc(len(scan.torn))
        newest = {found.key: found for found in sorted(scan.blocks, key=lambda found: found.number)}
        for found in scan.blocks:
            if newest[found.key] is found:
                self._index.adopt(found.key, found.number, found.nbytes)
        for found in scan.torn + scan.blocks:
            if newest.get(found.key) is not found:
                self._files.remove(self._folder.block_path(found.key, found.number))
        while self._index.used_bytes > self._capacity_bytes:
            coldest = self._index.take_coldest()
            assert coldest is not None, "bytes in use without a block"
            key, block = coldest
            self._files.remove(self._folder.block_path(key, block.number))
            self._index.gone(block)
        self._outbox.post(EventKind.STORED, [key for key in newest if self._index.find(key) is not None])
        self._outbox.flush()

    def _load(self, key: StoreKey, block: DiskBlock | None, into: memoryview) -> Status:
        """Reads, verifies and unpacks one block. An I/O thread."""
        if block is None or block.nbytes > HEADER_BYTES + len(into):
            return Status.MISS
        buffer = self._buffer.sized(block.nbytes)
        try:
            num_read = self._files.read(self._folder.block_path(key, block.number), buffer)
            if num_read != block.nbytes:
                raise CorruptBlockError(f"file of {num_read} bytes instead of {block.nbytes}")
            header, stored = parse_stored_header(buffer), buffer[HEADER_BYTES : block.nbytes]
            verify(header, key, stored)
            if header.raw_length != len(into):  # sound, but not what the caller takes it for
                return Status.MISS
            unpack(header, stored, into)
        except OSError as error:
            evicted_meanwhile = error.errno not in _PASSING_ERRNOS and not self._drop(key, block)
            if not evicted_meanwhile:
                self._note_error("read", error)
            return Status.MISS
        except CorruptBlockError as error:
            if self._drop(key, block):
                self._metrics.corrupt_blocks.labels(self._name).inc()
                self._log.warning(f"tier {self._name}: dropped a corrupt block: {error}")
            return Status.MISS
        return Status.HIT

    def _store(self, block: DiskBlock | None, item: tuple[StoreKey, ReadableBuffer]) -> WriteStatus:
        """Writes one claimed block to its place. An I/O thread."""
        key, payload = item
        if block is None:
            return WriteStatus.EXISTS
        temp, final = self._folder.temp_path(block.number), self._folder.block_path(key, block.number)
        try:
            header, stored = encode(key, payload, self._codec)
            nbytes = HEADER_BYTES + len(stored)
            if not self._make_room(key, block, nbytes):
                return WriteStatus.FULL
            buffer = self._buffer.sized(nbytes)
            copy_bytes(buffer, header)
            copy_bytes(buffer[HEADER_BYTES:], stored)
            self._files.write(temp, buffer, nbytes)
            self._files.rename(temp, final)
        except OSError as error:
            self._note_error("write", error)
            for path in (temp, final):  # a rename that failed may have happened
                self._remove_path(path)
            return WriteStatus.FULL if error.errno in _NO_SPACE_ERRNOS else WriteStatus.FAILED
        return WriteStatus.STORED

    def _make_room(self, key: StoreKey, block: DiskBlock, nbytes: int) -> bool:
        """Sets disk space aside for a file of `nbytes`, evicting what must go; False when there is not enough."""
        needed_bytes = footprint_bytes(nbytes)
        while True:
            free_bytes = self._files.free_bytes(self._folder.path)
            with self._lock:
                used_bytes = self._index.used_bytes
                limit_bytes = min(self._capacity_bytes, used_bytes + free_bytes - self._reserve_bytes)
                if needed_bytes > limit_bytes:
                    break
                if used_bytes + needed_bytes <= limit_bytes:
                    self._index.set_aside(key, block, nbytes)
                    return True
                coldest = self._index.take_coldest()
                if coldest is None:
                    return False
                self._metrics.evicted_blocks.labels(self._name).inc()
                self._outbox.post(EventKind.REMOVED, [coldest[0]])
            if not self._remove_file(*coldest):
                return False
        self._log.warning(
            f"tier {self._name}: no room for {needed_bytes:,} bytes: the capacity is {self._capacity_bytes:,}, and the "
            f"file system has {free_bytes:,} free, of which {self._reserve_bytes:,} are left to others"
        )
        return False

    def _finish(self, writes: Sequence[tuple[StoreKey, DiskBlock, WriteStatus]]) -> None:
        """Publishes what was stored, last to first, and forgets the rest. The caller's thread."""
        published: list[StoreKey] = []
        discarded: list[tuple[StoreKey, DiskBlock]] = []
        with self._lock:
            for key, block, status in reversed(writes):
                if status is not WriteStatus.STORED:
                    self._index.take_out(key, block)
                    self._index.gone(block)
                elif self._index.commit(key, block):
                    published.append(key)
                else:
                    discarded.append((key, block))
            published.reverse()
            self._outbox.post(EventKind.STORED, published)
        for key, block in discarded:
            self._remove_file(key, block)

    def _drop(self, key: StoreKey, block: DiskBlock) -> bool:
        """Forgets a block that turned out bad; False when it was replaced or evicted meanwhile."""
        with self._lock:
            if self._index.take_out(key, block) is None:
                return False
            self._outbox.post(EventKind.REMOVED, [key])
        self._remove_file(key, block)
        return True

    def _remove_file(self, key: StoreKey, block: DiskBlock) -> bool:
        """Unlinks the file of a hidden block; its bytes count until that worked."""
        if not self._remove_path(self._folder.block_path(key, block.number)):
            return False
        with self._lock:
            self._index.gone(block)
        return True

    def _remove_path(self, path: str) -> bool:
        """True when the file is gone now."""
        try:
            self._files.remove(path)
        except FileNotFoundError:
            return True
        except OSError as error:
            self._note_error("remove", error)
            return False
        return True

    def _note_error(self, op: str, error: OSError) -> None:
        code = errno.errorcode.get(error.errno or 0, "unknown")
        self._metrics.io_errors.labels(self._name, op, code).inc()
        self._log.warning(f"tier {self._name}: {op} failed: {error}")

    def _run(self, task: Callable[..., _Answer], *arguments: Iterable[object]) -> list[Future[_Answer]]:
        """Runs `task` once per item on the I/O threads; all of them are done on return."""
        futures = [self._executor.submit(task, *item) for item in zip(*arguments, strict=True)]
        wait(futures)
        return futures
