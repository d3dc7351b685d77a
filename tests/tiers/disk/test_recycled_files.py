"""Files that a disk tier uses again: nothing of what they held is found, and they take no room from anybody."""

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from disk_rig import WeighedFiles, contents, killed, opened, overwrite, segments, used_bytes
from disk_tier_rig import KIB, MIB, Open, block, load, loaded, reopening, value
from kvtier.identity.keys import tenant_id
from kvtier.metrics import Metrics
from kvtier.testing.blocks import TENANT, make_key, make_payload, read_blocks
from kvtier.testing.faults import FaultyFiles
from kvtier.tiers.base import WriteStatus
from kvtier.tiers.disk.medium.files import OsFiles
from kvtier.tiers.disk.reclaim import recycled_files as spares
from kvtier.tiers.disk.state.segment_files import SyncPolicy
from kvtier.tiers.disk.tier import DiskTier

SEGMENT_BYTES = 64 * KIB
BLUE = tenant_id("blue")


class Watched(OsFiles):
    """Notes what is done to files, in order."""

    def __init__(self) -> None:
        super().__init__(direct=False)
        self.done: list[str] = []

    def create(self, path: str, nbytes: int) -> int:
        self.done.append("create")
        return super().create(path, nbytes)

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        self.done.append("write")
        super().write(fd, buffers, offset)

    def zero(self, fd: int, nbytes: int) -> None:
        self.done.append("zero")
        super().zero(fd, nbytes)

    def rename(self, path: str, new_path: str) -> None:
        self.done.append("rename")
        super().rename(path, new_path)

    def sync(self, fd: int) -> None:
        self.done.append("sync")
        super().sync(fd)


@pytest.fixture(autouse=True)
def small_files_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spares, "_LEAST_BYTES", SEGMENT_BYTES // 2)


@pytest.fixture(autouse=True)
def a_file_system_that_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where this one cannot zero files, zeros are written: all else is the same."""
    files = OsFiles(direct=False)
    fd = files.create(str(tmp_path / "probe"), 4 * KIB)
    try:
        files.zero(fd, 8 * KIB)
    except OSError:
        monkeypatch.setattr(OsFiles, "zero", lambda _, fd, nbytes: os.pwrite(fd, bytes(nbytes), 0))
        files.zero(fd, 8 * KIB)
    finally:
        files.close(fd)
    assert (tmp_path / "probe").read_bytes() == bytes(8 * KIB)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "disk"


@pytest.fixture
def open_disk(folder: Path) -> Iterator[Open]:
    with reopening(folder) as open_one:
        yield open_one


def fill(tier: DiskTier, label: object, num: int = 6) -> None:
    """More than a segment takes, one after the other."""
    for i in range(num):
        assert tier.write([block((label, i))]) == [WriteStatus.STORED]


def forget(tier: DiskTier, label: object, num: int = 6) -> None:
    tier.discard([make_key((label, i)) for i in range(num)])
    tier.check()  # what is being sealed is over then


def spare_files(folder: Path) -> list[Path]:
    return [path for path in segments(folder) if not any(path.read_bytes())]


def test_the_file_of_a_segment_that_went_is_that_of_a_later_one(folder: Path, open_disk: Open) -> None:
    files = Watched()
    tier = open_disk(MIB, segment_bytes=SEGMENT_BYTES, files=files)
    fill(tier, "old")
    forget(tier, "old")
    old = {path.stat().st_ino: path for path in spare_files(folder)}
    assert old
    files.done.clear()
    fill(tier, "new", 12)
    tier.check()
    assert files.done.count("rename") == len(old)
    again = [path for path in segments(folder) if path.stat().st_ino in old]
    assert len(again) == len(old)
    assert all(path.stem > before.stem for path in again for before in old.values())
    assert loaded(tier, [("new", i) for i in range(12)]) == [True] * 12
    everything = b"".join(path.read_bytes() for path in segments(folder))
    assert not any(block(("old", i))[1] in everything for i in range(6))
    assert block(("new", 0))[1] in everything
    assert loaded(open_disk(MIB), [("old", 0), ("new", 0), ("new", 11)]) == [False, True, True]


def test_nothing_of_one_tenant_is_in_a_file_that_another_gets(folder: Path, open_disk: Open) -> None:
    tier = open_disk(MIB, segment_bytes=SEGMENT_BYTES)
    fill(tier, "secret", 12)
    assert block(("secret", 0))[1] in b"".join(path.read_bytes() for path in segments(folder))
    tier.purge(TENANT)
    tier.check()
    inodes = {path.stat().st_ino for path in spare_files(folder)}
    assert inodes
    items = [(make_key(i, tenant=BLUE), make_payload(i, 100)) for i in range(8)]
    for item in items:
        tier.write([item])
    assert inodes & {path.stat().st_ino for path in segments(folder) if path not in spare_files(folder)}
    everything = b"".join(path.read_bytes() for path in segments(folder))
    assert not any(block(("secret", i))[1] in everything for i in range(12))


def test_files_never_take_more_than_the_capacity(folder: Path, open_disk: Open) -> None:
    files = WeighedFiles(folder)
    tier = open_disk(MIB, segment_bytes=SEGMENT_BYTES, files=files)

    def work(worker: int) -> None:
        for i in range(60):
            tier.write([block((worker, i, j)) for j in range(3)])
            if i % 10 == 9:
                tier.discard([make_key((worker, i - n, j)) for n in range(9) for j in range(3)])

    with ThreadPoolExecutor(4) as executor:
        list(executor.map(work, range(4)))
    assert files.num_zeroed > 10
    assert MIB // 2 <= max(files.seen) <= MIB
    tier.check()
    assert tier.usage().used_bytes == used_bytes(folder)


def test_they_go_before_anything_is_evicted(folder: Path, open_disk: Open) -> None:
    tier = open_disk(MIB, segment_bytes=SEGMENT_BYTES)
    fill(tier, "old", 24)
    forget(tier, "old", 24)
    num = len(spare_files(folder))
    assert 2 <= num <= 5
    large = make_payload("large", 400 * KIB)
    assert tier.write([block("kept"), (make_key("large"), large)]) == [WriteStatus.STORED] * 2
    assert len(spare_files(folder)) < num
    assert load(tier, "kept") == block("kept")[1]
    assert read_blocks(tier, [make_key("large")], len(large)) == [large]


def test_they_go_when_others_need_the_file_system(folder: Path, open_disk: Open) -> None:
    class Roomy(OsFiles):
        """A file system with as much free space as the test says."""

        size_bytes = 4 * MIB

        def free_bytes(self, directory: str) -> int:
            return self.size_bytes - used_bytes(Path(directory))

    files = Roomy(direct=False)
    tier = open_disk(2 * MIB, segment_bytes=SEGMENT_BYTES, files=files, reserve_bytes=MIB)
    fill(tier, "old", 24)
    forget(tier, "old", 24)
    assert spare_files(folder)
    files.size_bytes = MIB + 3 * SEGMENT_BYTES
    fill(tier, "new", 12)
    assert used_bytes(folder) <= 3 * SEGMENT_BYTES
    forget(tier, "new", 12)
    assert used_bytes(folder) <= 3 * SEGMENT_BYTES


def test_a_start_finds_nothing_in_them(tmp_path: Path, folder: Path, open_disk: Open) -> None:
    tier = open_disk(MIB, segment_bytes=SEGMENT_BYTES)
    fill(tier, "old", 12)
    forget(tier, "old", 12)
    fill(tier, "new", 1)
    (spare, *_) = spare_files(folder)
    copy = killed(folder, tmp_path / "copy")
    (copy / "0000ffff.segment").hardlink_to(copy / spare.name)  # it died before the old name was gone
    metrics = Metrics()
    with opened(copy, MIB, metrics=metrics) as again:
        assert loaded(again, [("old", 0), ("old", 11), ("new", 0)]) == [False, False, True]
        assert spare_files(copy) == []
    assert value(metrics, "kvtier_corrupt_blocks_total") == value(metrics, "kvtier_torn_blocks_total") == 0
    assert value(metrics, "kvtier_foreign_files") == 0


@pytest.mark.parametrize("zeroed_bytes", [4 * KIB, 20 * KIB, 40 * KIB])
def test_a_file_that_was_being_emptied_brings_back_nothing_wrong(
    tmp_path: Path, folder: Path, open_disk: Open, zeroed_bytes: int
) -> None:
    """As far as its process came; the file has its old name yet."""
    tier = open_disk(MIB, segment_bytes=SEGMENT_BYTES)
    fill(tier, "old", 6)
    tier.check()
    copy = killed(folder, tmp_path / "copy")
    overwrite(segments(copy)[0], 0, bytes(zeroed_bytes))
    with opened(copy, MIB) as again:
        found = [load(again, ("old", i)) for i in range(6)]
    assert all(payload in (None, block(("old", i))[1]) for i, payload in enumerate(found))


def test_old_records_under_a_new_header_are_not_found(tmp_path: Path, folder: Path, open_disk: Open) -> None:
    """Of a file system that lost power before it had noted that the file was emptied: its old bytes are back."""
    tier = open_disk(MIB, segment_bytes=SEGMENT_BYTES)
    fill(tier, "old", 12)
    tier.check()
    before = segments(folder)[0].read_bytes()
    forget(tier, "old", 12)
    fill(tier, "new", 1)
    copy = killed(folder, tmp_path / "copy")
    (path,) = segments(copy)[-1:]
    now = path.read_bytes()
    (end,) = {contents(path).end_page * 4 * KIB}
    path.write_bytes(now[:end] + before[end:])
    with opened(copy, MIB) as again:
        assert loaded(again, [("old", i) for i in range(12)]) == [False] * 12
        assert loaded(again, [("new", 0)]) == [True]


def test_a_block_that_is_read_while_its_file_becomes_another_is_a_miss(folder: Path, open_disk: Open) -> None:
    reached, go_on = threading.Event(), threading.Event()

    class Halting(Watched):
        def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if not reached.is_set():
                reached.set()
                assert go_on.wait(20)
            return super().read(fd, buffers, offset)

    files, metrics = Halting(), Metrics()
    tier = open_disk(MIB, segment_bytes=SEGMENT_BYTES, files=files, metrics=metrics)
    fill(tier, "old", 6)
    tier.check()
    with ThreadPoolExecutor(1) as executor:
        reading = executor.submit(load, tier, ("old", 0))
        assert reached.wait(20)
        try:
            tier.discard([make_key(("old", i)) for i in range(6)])
            fill(tier, "new", 12)
            assert "rename" in files.done
        finally:
            go_on.set()
        assert reading.result(20) is None
    assert value(metrics, "kvtier_corrupt_blocks_total") == 0
    assert loaded(tier, [("new", i) for i in range(12)]) == [True] * 12


@pytest.mark.parametrize(("sync", "synced"), [(SyncPolicy.NONE, False), (SyncPolicy.SEALED, True)])
def test_that_they_are_empty_outlives_a_loss_of_power_where_discards_do(
    folder: Path, open_disk: Open, sync: SyncPolicy, synced: bool
) -> None:
    files = Watched()
    tier = open_disk(MIB, segment_bytes=SEGMENT_BYTES, files=files, sync=sync, num_threads=1)
    fill(tier, "old")
    tier._files._syncer.submit(int).result()  # segments that were sealed are synced now
    files.done.clear()
    forget(tier, "old")
    first = files.done.index("zero")
    assert (files.done[first + 1 : first + 2] == ["sync"]) is synced


class TestWhereItDoesNotWork:
    def test_files_are_removed_and_it_is_not_tried_again(self, folder: Path, open_disk: Open) -> None:
        metrics = Metrics()
        files = FaultyFiles(OsFiles(direct=False))
        tier = open_disk(MIB, segment_bytes=SEGMENT_BYTES, files=files, metrics=metrics)
        files.fail_next("zero", errno.EOPNOTSUPP)
        for label in range(3):
            fill(tier, label)
            forget(tier, label)
            assert spare_files(folder) == []
        assert value(metrics, "kvtier_io_errors_total", op="empty", error="EOPNOTSUPP") == 0, "that is no failure"

    def test_now_the_file_is_removed(self, folder: Path, open_disk: Open) -> None:
        metrics = Metrics()
        files = FaultyFiles(OsFiles(direct=False))
        tier = open_disk(MIB, segment_bytes=SEGMENT_BYTES, files=files, metrics=metrics)
        fill(tier, "old")
        num = len(segments(folder))
        files.fail_next("zero", errno.EIO, times=num)
        forget(tier, "old")
        assert spare_files(folder) == []
        assert value(metrics, "kvtier_io_errors_total", op="empty", error="EIO") == num
        fill(tier, "new")
        forget(tier, "new")
        assert spare_files(folder)

    def test_to_rename_one_another_is_made(self, folder: Path, open_disk: Open) -> None:
        files = FaultyFiles(OsFiles(direct=False))
        tier = open_disk(MIB, segment_bytes=SEGMENT_BYTES, files=files)
        fill(tier, "old")
        forget(tier, "old")
        num_spare = len(spare_files(folder))
        files.fail_next("rename", errno.EPERM)
        fill(tier, "new", 12)
        assert loaded(tier, [("new", i) for i in range(12)]) == [True] * 12
        assert len(spare_files(folder)) < num_spare
        tier.check()
        assert tier.usage().used_bytes == used_bytes(folder)

    @pytest.mark.parametrize("op", ["open", "zero", "write"])
    def test_to_begin_one_the_write_fails_and_leaves_nothing(self, folder: Path, open_disk: Open, op: str) -> None:
        files = FaultyFiles(OsFiles(direct=False))
        tier = open_disk(MIB, segment_bytes=SEGMENT_BYTES, files=files)
        fill(tier, "old")
        forget(tier, "old")
        num_spare = len(spare_files(folder))
        files.fail_next(op, errno.EIO)
        assert tier.write([block("new")]) == [WriteStatus.FAILED]
        assert len(spare_files(folder)) == num_spare - 1
        assert tier.write([block("new")]) == [WriteStatus.STORED]
        tier.check()
        assert tier.usage().used_bytes == used_bytes(folder)

    def test_a_file_of_somebody_else_is_not_replaced(self, folder: Path, open_disk: Open) -> None:
        tier = open_disk(MIB, segment_bytes=SEGMENT_BYTES)
        fill(tier, "old")
        forget(tier, "old")
        assert spare_files(folder)
        foreign = [folder / f"{number:08x}.segment" for number in range(1, 10)]
        foreign = [path for path in foreign if not path.exists()]
        for path in foreign:
            path.write_bytes(b"mine")
        fill(tier, "new", 12)
        assert [path.read_bytes() for path in foreign] == [b"mine"] * len(foreign)
        assert loaded(tier, [("new", i) for i in range(12)]) == [True] * 12


def test_closing_removes_them(folder: Path) -> None:
    tier = DiskTier.open(folder, MIB, reserve_bytes=0, segment_bytes=SEGMENT_BYTES)
    fill(tier, "old", 12)
    forget(tier, "old", 12)
    assert spare_files(folder)
    tier.close()
    assert spare_files(folder) == []
