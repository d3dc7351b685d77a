"""What a disk tier was told to forget stays forgotten, whoever else works on it, and costs the others little."""

import errno
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from disk_rig import contents, damage, killed, opened, overwrite, place_of, segments
from kvtier.keys import StoreKey, TenantId
from kvtier.metrics import Metrics
from kvtier.testing.blocks import TENANT, make_key, make_payload, read_blocks
from kvtier.testing.faults import FaultyFiles
from kvtier.tiers.base import Status, WriteStatus
from kvtier.tiers.disk import DiskTier
from kvtier.tiers.disk_log import forgetting
from kvtier.tiers.disk_log.format import PAGE, Kind
from kvtier.tiers.disk_log.index import Rows
from kvtier.tiers.files import OsFiles

KIB, MIB = 2**10, 2**20
WAIT_S = 20
SMALL, LARGE = 4096, 40_000

Forget = Callable[[DiskTier, Sequence[StoreKey]], object]


def items(labels: Sequence[object], nbytes: int = SMALL) -> list[tuple[StoreKey, bytes]]:
    return [(make_key(label), make_payload(label, nbytes)) for label in labels]


def found(tier: DiskTier, labels: Sequence[object]) -> int:
    return tier.lookup([make_key(label) for label in labels]).count(Status.HIT)


def discard(tier: DiskTier, keys: Sequence[StoreKey]) -> object:
    return tier.discard(keys)


def purge(tier: DiskTier, keys: Sequence[StoreKey]) -> object:
    return tier.purge(TenantId(keys[0][: len(TENANT)]))


class Held(OsFiles):
    """Stops in one operation, before or after it, until the test goes on."""

    def __init__(self, op: str, *, after: bool = False) -> None:
        super().__init__(direct=False)
        self._op, self._after = op, after
        self.armed = self.reached = False
        self._arrived, self.go_on = threading.Event(), threading.Event()

    def wait_until_reached(self) -> None:
        assert self._arrived.wait(WAIT_S)

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        with self._held("write" if offset else ""):
            super().write(fd, buffers, offset)

    def truncate(self, fd: int, nbytes: int) -> None:
        with self._held("" if nbytes else "cut"):
            super().truncate(fd, nbytes)

    def _held(self, op: str) -> "_Hold":
        mine = op == self._op and self.armed
        self.armed &= not mine
        return _Hold(self, before=mine and not self._after, after=mine and self._after)

    def hold(self) -> None:
        self._arrived.set()
        assert self.go_on.wait(WAIT_S)


class _Hold:
    def __init__(self, files: Held, *, before: bool, after: bool) -> None:
        self._files, self._before, self._after = files, before, after

    def __enter__(self) -> None:
        if self._before:
            self._files.hold()

    def __exit__(self, *_: object) -> None:
        if self._after:
            self._files.hold()


class TestAKill:
    """What a copy of the folder holds, taken at the moment."""

    def test_while_blocks_that_were_discarded_are_evicted(self, tmp_path: Path) -> None:
        """The index no longer has them, and their file is still there."""
        files = Held("cut")
        with opened(tmp_path / "disk", MIB, files=files) as tier, ThreadPoolExecutor(1) as executor:
            tier.write(items(range(8)))
            files.armed = True
            filling = executor.submit(lambda: [tier.write(items([("fill", i)], 20_000)) for i in range(100)])
            files.wait_until_reached()
            assert found(tier, range(8)) == 0
            tier.discard([make_key(i) for i in range(8)])
            copy = killed(tmp_path / "disk", tmp_path / "copy")
            files.go_on.set()
            filling.result(WAIT_S)
        with opened(copy, MIB) as tier:
            assert found(tier, range(8)) == 0

    @pytest.mark.parametrize("forget", [discard, purge])
    def test_after_the_first_write_of_a_tenant_landed_that_was_forgotten_meanwhile(
        self, tmp_path: Path, forget: Forget
    ) -> None:
        files = Held("write", after=True)
        with opened(tmp_path / "disk", files=files) as tier, ThreadPoolExecutor(1) as executor:
            files.armed = True
            writing = executor.submit(tier.write, items("a"))
            files.wait_until_reached()
            forget(tier, [make_key("a")])
            copy = killed(tmp_path / "disk", tmp_path / "copy")
            files.go_on.set()
            writing.result(WAIT_S)
            assert found(tier, "a") == 0
        with opened(copy) as tier:
            assert found(tier, "a") == 0
        with opened(tmp_path / "disk") as tier:
            assert found(tier, "a") == 0

    @pytest.mark.parametrize("forget", [discard, purge, "drop"])
    def test_while_somebody_else_forgets_the_same_block(self, tmp_path: Path, forget: Forget | str) -> None:
        """The one who took it out of the index is still writing that down; the other must not rely on it."""
        files = Held("write")
        with opened(tmp_path / "disk", files=files) as tier, ThreadPoolExecutor(1) as executor:
            tier.write(items(range(3)))
            if forget == "drop":
                path, offset, nbytes = place_of(tmp_path / "disk", make_key(1))
                sound = path.read_bytes()[offset : offset + nbytes]
                damage(tmp_path / "disk", make_key(1))
            files.armed = True
            if callable(forget):
                forgetting_it = executor.submit(forget, tier, [make_key(1)])
            else:
                forgetting_it = executor.submit(read_blocks, tier, [make_key(1)], SMALL)
            files.wait_until_reached()
            if forget == "drop":
                overwrite(path, offset, sound)  # it was the read that failed
            assert tier.discard([make_key(1)]) == 0
            copy = killed(tmp_path / "disk", tmp_path / "copy")
            files.go_on.set()
            forgetting_it.result(WAIT_S)
        with opened(copy) as tier:
            assert found(tier, [1]) == 0

    def test_after_a_purge_that_came_before_the_first_segment(self, tmp_path: Path) -> None:
        class Slow(OsFiles):
            made, landed = threading.Event(), threading.Event()
            make, go_on = threading.Event(), threading.Event()

            def create(self, path: str, nbytes: int) -> int:
                self.made.set()
                assert self.make.wait(WAIT_S)
                return super().create(path, nbytes)

            def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
                super().write(fd, buffers, offset)
                if offset and sum(map(len, buffers)) > SMALL and not self.landed.is_set():
                    self.landed.set()
                    assert self.go_on.wait(WAIT_S)

        files = Slow(direct=False)
        with opened(tmp_path / "disk", files=files) as tier, ThreadPoolExecutor(2) as executor:
            writing = executor.submit(tier.write, items("a"))
            assert files.made.wait(WAIT_S)
            purging = executor.submit(tier.purge, TENANT)
            while not tier._books.purged:
                assert not purging.done()
            files.make.set()
            assert files.landed.wait(WAIT_S)
            assert purging.result(WAIT_S) == 0
            copy = killed(tmp_path / "disk", tmp_path / "copy")
            files.go_on.set()
            writing.result(WAIT_S)
            assert found(tier, "a") == 0
        with opened(copy) as tier:
            assert found(tier, "a") == 0

    def test_after_a_write_failed_that_had_landed(self, tmp_path: Path) -> None:
        """Half of an extent is there, and its block was discarded, not knowing."""
        files = FaultyFiles(OsFiles(direct=False))
        with opened(tmp_path / "disk", files=files, segment_bytes=MIB) as tier, ThreadPoolExecutor(1) as executor:
            held = Held("write")
            files._inner = held
            held.armed = True
            writing = executor.submit(tier.write, items(["other"]))  # so that the segment is not sealed at once
            held.wait_until_reached()
            files.fail_next("write", errno.EIO)
            assert set(tier.write(items(range(6)))) == {WriteStatus.FAILED}
            tier.discard([make_key(i) for i in range(6)])
            copy = killed(tmp_path / "disk", tmp_path / "copy")
            held.go_on.set()
            writing.result(WAIT_S)
        with opened(copy) as tier:
            assert found(tier, range(6)) == 0


class TestCopiesThatTheIndexDoesNotHave:
    """What is discarded later must be forgotten there, too."""

    @pytest.mark.parametrize("sealed", [False, True])
    def test_of_a_block_that_was_dropped_without_a_tombstone(self, tmp_path: Path, sealed: bool) -> None:
        files = FaultyFiles(OsFiles(direct=False))
        with opened(tmp_path / "disk", files=files) as tier:
            tier.write(items(range(3)))
            if sealed:
                tier._log.retire_all()
            files.fail_next("read", errno.EIO)
            files.fail_next("write", errno.EIO, times=2)
            assert read_blocks(tier, [make_key(1)], SMALL) == [None]
            tier.discard([make_key(1)])
            copy = killed(tmp_path / "disk", tmp_path / "copy")
        for folder in (copy, tmp_path / "disk"):
            with opened(folder) as tier:
                assert [found(tier, [i]) for i in range(3)] == [1, 0, 1]

    def test_of_blocks_that_were_moved_before_a_kill(self, tmp_path: Path) -> None:
        """The segment with the copies goes first."""
        files = Held("cut")
        labels = range(3)
        with opened(tmp_path / "disk", MIB, files=files) as tier, ThreadPoolExecutor(1) as executor:
            tier.write(items(labels))
            read_blocks(tier, [make_key(i) for i in labels], SMALL)
            files.armed = True
            filling = executor.submit(lambda: [tier.write(items([("fill", i)], 20_000)) for i in range(100)])
            files.wait_until_reached()
            copy = killed(tmp_path / "disk", tmp_path / "copy")
            files.go_on.set()
            filling.result(WAIT_S)
        with opened(copy, 2 * MIB) as tier:
            assert found(tier, labels) == len(labels)
            (number,) = set(
                tier._books.index.records(tier._books.index.find(tier._books.tags([make_key(0)])))["segment"]
            )
            assert number > 1
            with tier._books.lock:
                newest = tier._books.segments.mark(next(s for s in tier._books.segments if s.number == number))
            assert tier._room.evict(newest)
            assert found(tier, labels) == 0
            tier.discard([make_key(i) for i in labels])
            again = killed(copy, tmp_path / "again")
        for folder in (again, copy):
            with opened(folder, 2 * MIB) as tier:
                assert found(tier, labels) == 0


def test_a_footer_is_read_again_before_a_scan_that_may_miss_tombstones(tmp_path: Path) -> None:
    class Flipping(OsFiles):
        armed = False

        def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            done = super().read(fd, buffers, offset)
            if self.armed and bytes(buffers[-1][-32:-24]) == b"KVTTRAIL":
                self.armed = False
                buffers[-1][-1] ^= 1
            return done

    files = Flipping(direct=False)
    with opened(tmp_path / "disk", files=files) as tier:
        tier.write(items(range(3)))
        tier.discard([make_key(1)])
        tier._log.retire_all()
        (segment,) = tier._books.segments
        (path,) = segments(tmp_path / "disk")
        place = contents(path)
        assert place.sealed
        head = int((place.entries["kind"] == Kind.FORGET).argmax())
        overwrite(path, (int(place.entries["page"][head]) - 1) * PAGE, bytes(PAGE))
        files.armed = True
        entries = tier._files.entries(segment)
        assert not files.armed
        assert entries is not None
        assert entries["kind"].tolist() == [Kind.RECORD] * 3 + [Kind.FORGET]


@pytest.mark.parametrize("forget", [discard, purge])
@pytest.mark.parametrize(("times", "waits"), [(1, True), (2, True), (2, False)])
def test_a_tombstone_that_cannot_be_written_beside_a_write_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forget: Forget, times: int, waits: bool
) -> None:
    """Once: it goes to another segment. Twice: the segment goes when the write is over, which is waited for a while."""

    class NoTombstones(Held):
        left = 0

        def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
            if self.left and bytes(buffers[0][:8]) == b"KVTEXTNT" and sum(map(len, buffers)) == PAGE:
                self.left -= 1
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            super().write(fd, buffers, offset)

    files = NoTombstones("write")
    monkeypatch.setattr(forgetting, "_PATIENCE_S", WAIT_S if waits else 0.01)
    with opened(tmp_path / "disk", files=files) as tier, ThreadPoolExecutor(2) as executor:
        tier.write(items(range(20)))
        (first,) = tier._books.segments
        files.armed = True
        writing = executor.submit(tier.write, items(["other"]))
        files.wait_until_reached()
        files.left = times
        forgetting_all = executor.submit(forget, tier, [make_key(i) for i in range(20)])
        if times == 2 and waits:
            while not first.doomed:
                assert not forgetting_all.done()
            files.go_on.set()
        forgetting_all.result(WAIT_S)
        assert not files.left
        copies = [killed(tmp_path / "disk", tmp_path / "at once")] if times == 1 or waits else []
        files.go_on.set()
        writing.result(WAIT_S)
        tier.check()  # what was filled is sealed, or removed, then
        assert found(tier, range(20)) == 0
        copies.append(killed(tmp_path / "disk", tmp_path / "copy"))
    for folder in (*copies, tmp_path / "disk"):
        with opened(folder) as tier:
            assert found(tier, range(20)) == 0


def discards_during_a_batch(folder: Path, num_discards: int, **options: Any) -> None:
    """Segments each with records that are older than tombstones in others, all of which were needed."""
    left = [make_key(("early", i)) for i in range(num_discards)]

    class Discarding(OsFiles):
        armed = False

        def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
            super().write(fd, buffers, offset)
            if self.armed and left and sum(map(len, buffers)) > 2 * SMALL:
                thread = threading.Thread(target=tier.discard, args=([left.pop()],))
                thread.start()
                thread.join(WAIT_S)

    files = Discarding(direct=False)
    with opened(folder, files=files, num_threads=1, **options) as tier:
        tier.write(items([("early", i) for i in range(num_discards)]))
        files.armed = True
        tier.write(items([("batch", i) for i in range(28)], 16_000))
        files.armed = False
        i = 0
        while tier.usage().used_bytes < MIB - 3 * 64 * KIB:
            tier.write(items([("fill", i)], 16_000))
            i += 1


def test_tombstones_that_are_needed_never_stop_an_eviction(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    discards_during_a_batch(folder, 24, capacity_bytes=MIB, segment_bytes=64 * KIB)
    capacity_bytes = sum(path.stat().st_size for path in segments(folder)) + 4096
    for life in range(2):
        with opened(folder, capacity_bytes, segment_bytes=64 * KIB) as tier:
            statuses = [tier.write(items([(life, i)], 16_000))[0] for i in range(100)]
            assert set(statuses) == {WriteStatus.STORED}
            assert found(tier, [("early", i) for i in range(24)]) == 0


def test_tombstones_outlive_the_segment_that_they_were_in(tmp_path: Path) -> None:
    """A segment that goes leaves those that older segments need, in a few pages."""
    folder = tmp_path / "disk"
    with opened(folder, MIB, segment_bytes=128 * KIB) as tier:
        tier.write(items(range(4)))
        (old,) = tier._books.segments
        for i in range(6):
            tier.write(items([("fill", i)], LARGE))
        tier.discard([make_key(1), make_key(3)])
        with tier._books.lock:
            holder = next(s for s in tier._books.segments if s.last_forget)
            tier._books.segments.mark(holder)
        assert holder is not old
        tier._log.retire_all()
        tier._log.wait()
        assert tier._room.evict(holder)
        assert holder.num_pages == 3
        tier.check()
        copy = killed(folder, tmp_path / "copy")
    for place in (copy, folder):
        with opened(place, MIB) as tier:
            assert [found(tier, [i]) for i in range(4)] == [1, 0, 1, 0]


def test_a_purge_leaves_no_file_whatever_tombstones_point_where(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    discards_during_a_batch(folder, 24, capacity_bytes=4 * MIB, segment_bytes=64 * KIB)
    with opened(folder) as tier:
        assert tier.purge(TENANT) > 0
        assert segments(folder) == []
        assert tier.usage().used_bytes == 0


def test_damaged_blocks_of_a_read_are_dropped_together(tmp_path: Path) -> None:
    num_writes = 0

    class Counting(OsFiles):
        def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
            nonlocal num_writes
            num_writes += 1
            super().write(fd, buffers, offset)

    metrics = Metrics()
    with opened(tmp_path / "disk", files=Counting(direct=False), metrics=metrics) as tier:
        tier.write(items(range(200)))
        for i in range(0, 200, 2):
            damage(tmp_path / "disk", make_key(i))
        num_writes = 0
        hits = [block is not None for block in read_blocks(tier, [make_key(i) for i in range(200)], SMALL)]
        assert hits == [i % 2 == 1 for i in range(200)]
        assert num_writes <= 3
        assert metrics.registry.get_sample_value("kvtier_corrupt_blocks_total", {"tier": "disk"}) == 100


def test_reads_do_not_wait_for_a_batch_that_is_being_written(tmp_path: Path) -> None:
    class Slow(OsFiles):
        gate = threading.Event()

        def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
            if sum(map(len, buffers)) > 100 * KIB:
                assert self.gate.wait(WAIT_S)
            super().write(fd, buffers, offset)

    files = Slow(direct=False)
    with opened(tmp_path / "disk", 64 * MIB, files=files, num_threads=2) as tier, ThreadPoolExecutor(1) as executor:
        tier.write(items("a"))
        writing = executor.submit(tier.write, items(range(20), MIB))
        try:
            for _ in range(5):
                assert read_blocks(tier, [make_key("a")], SMALL) == [make_payload("a", SMALL)]
            assert not writing.done()
        finally:
            files.gate.set()
        assert set(writing.result(WAIT_S)) == {WriteStatus.STORED}


class TestLostSegments:
    def test_one_that_somebody_removed_is_missed_alone(self, tmp_path: Path) -> None:
        with opened(tmp_path / "disk", segment_bytes=MIB) as tier:
            for i in range(4):
                tier.write(items([(i, j) for j in range(40)]))
                tier._log.retire_all()
            tier._files.descriptors.forget(1)
            segments(tmp_path / "disk")[0].unlink()
            labels = [(i, j) for i in range(4) for j in range(40)]
            blocks = read_blocks(tier, [make_key(label) for label in labels], SMALL)
            assert [block is not None for block in blocks] == [i > 0 for i, _ in labels]
            assert tier.write(items(["new"])) == [WriteStatus.STORED]

    def test_a_bad_region_does_not_switch_the_tier_off(self, tmp_path: Path) -> None:
        class Bad(OsFiles):
            end = 0

            def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
                if offset < self.end:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                return super().read(fd, buffers, offset)

        files = Bad(direct=False)
        with opened(tmp_path / "disk", files=files, segment_bytes=MIB, capacity_bytes=32 * MIB) as tier:
            tier.write(items(range(100)))
            files.end = MIB // 2
            tier.write(items([("fill", i) for i in range(40)]))
            tier.write(items(["other"]))
            assert read_blocks(tier, [make_key(i) for i in range(100)], SMALL) == [None] * 100
            assert read_blocks(tier, [make_key("other")], SMALL) == [make_payload("other", SMALL)]


class CountingLock:
    """Counts the lines that a thread runs while it has the lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.most = self._count = 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._count = 0
        sys.settrace(self._trace)
        sys._getframe(1).f_trace = self._trace

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        sys._getframe(1).f_trace = None
        self.most = max(self.most, self._count)
        self._lock.release()

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        self._count += event == "line"
        return self._trace


@pytest.fixture
def slices(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many records each step of a purge has taken out, eight at the most."""
    monkeypatch.setattr(forgetting, "_ROWS_AT_ONCE", 8)
    taken: list[int] = []
    take_out = forgetting.Books.take_out

    def counted(books: forgetting.Books, rows: Rows) -> None:
        taken.append(len(rows))
        take_out(books, rows)

    monkeypatch.setattr(forgetting.Books, "take_out", counted)
    return taken


def test_forgetting_holds_others_up_no_longer_with_many_segments(tmp_path: Path, slices: list[int]) -> None:
    """Lines of Python under the tier's lock, in the longest hold, and records taken out in one."""
    most: dict[tuple[int, str], int] = {}
    for num_segments in (100, 400):
        with opened(tmp_path / str(num_segments), 256 * MIB, segment_bytes=32 * KIB) as tier:
            tier._books.seed = 1  # or the index would have to look further at times
            labels = range(2 * num_segments)
            for label in labels:
                tier.write(items([label], 10_000))
            assert len(segments(tmp_path / str(num_segments))) >= num_segments
            for name, forget in (("discard", discard), ("purge", purge)):
                tier._books.lock = lock = CountingLock()  # type: ignore[assignment]
                slices.clear()
                forget(tier, [make_key(labels[0]), make_key(labels[-1])])
                most[num_segments, name] = lock.most
                assert 0 < max(slices) <= 8
    for name in ("discard", "purge"):
        assert most[400, name] <= most[100, name] + 100, f"{most}: 300 segments more"
