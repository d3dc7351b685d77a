"""Room in a disk tier: many tenants, fair shares, less capacity than before, and files that cannot be removed."""

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from disk_rig import segments, used_bytes
from disk_tier_rig import KIB, MIB, NBYTES, Open, reopening
from kvtier.events import TierState
from kvtier.identity.keys import TenantId, tenant_id
from kvtier.testing.blocks import TENANT, make_key, make_payload, read_blocks, summed
from kvtier.tiers.base import Item, Status, WriteStatus
from kvtier.tiers.disk.log.format import NONCE_BYTES, PAGE, SegmentId
from kvtier.tiers.disk.log.segments import Segment
from kvtier.tiers.disk.medium.files import OsFiles
from kvtier.tiers.disk.state.segment_set import SegmentSet
from kvtier.tiers.disk.tier import DiskTier

GIB = 2**30


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "disk"


@pytest.fixture
def open_disk(folder: Path) -> Iterator[Open]:
    with reopening(folder) as open_one:
        yield open_one


def block(label: object, tenant: TenantId = TENANT, nbytes: int = NBYTES) -> Item[bytes]:
    return summed(make_key(label, tenant=tenant), make_payload((label, tenant), nbytes))


def found(tier: DiskTier, items: Sequence[Item[bytes]]) -> list[bool]:
    """Which of these can be read; never anything wrong."""
    payloads = read_blocks(tier, [key for key, _, _ in items], len(items[0][1]))
    assert all(p in (None, payload) for p, (_, payload, _) in zip(payloads, items, strict=True))
    return [payload is not None for payload in payloads]


def tenants(count: int) -> list[TenantId]:
    return [tenant_id(f"tenant-{number}") for number in range(count)]


class Sparse(OsFiles):
    """Files that take no more disk space than what is written to them, on a disk of a size that does not matter."""

    def __init__(self) -> None:
        super().__init__(direct=False)

    def create(self, path: str, nbytes: int) -> int:
        fd = super().create(path, PAGE)
        os.ftruncate(fd, nbytes)
        return fd

    def free_bytes(self, directory: str) -> int:
        return 100 * GIB


class Unremovable(OsFiles):
    """Files that cannot be unlinked, and perhaps not be cut either."""

    def __init__(self, *numbers: int, cut: bool) -> None:
        super().__init__(direct=False)
        self.numbers: Sequence[int] = numbers
        """The first and the last one."""
        self._cut = cut

    def remove(self, path: str) -> None:
        self._refuse(path)
        super().remove(path)

    def truncate(self, fd: int, nbytes: int) -> None:
        if not self._cut and not nbytes:
            self._refuse(os.readlink(f"/proc/self/fd/{fd}"))
        super().truncate(fd, nbytes)

    def _refuse(self, path: str) -> None:
        if self.numbers and self.numbers[0] <= int(Path(path).stem, 16) <= self.numbers[-1]:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM), path)


class TestTenants:
    def test_more_than_segments_lose_nothing_in_an_almost_empty_tier(self, folder: Path, open_disk: Open) -> None:
        tier = open_disk(16 * MIB)
        items = [block(i, tenant, 4 * KIB) for i in range(4) for tenant in tenants(100)]
        for item in items:
            assert tier.write([item]) == [WriteStatus.STORED]
        assert found(tier, items) == [True] * len(items)
        assert len(segments(folder)) <= 200
        assert found(open_disk(16 * MIB), items) == [True] * len(items)

    def test_a_thousand_share_the_default_sizes(self, folder: Path, open_disk: Open) -> None:
        tier = open_disk(10 * GIB, files=Sparse())
        items = [block(i, tenant, KIB) for i in range(3) for tenant in tenants(1000)]
        for item in items:
            assert tier.write([item]) == [WriteStatus.STORED]
        assert found(tier, items) == [True] * len(items)
        assert len(segments(folder)) <= 2000
        assert tier.usage().used_bytes < 5 * GIB

    def test_room_that_nobody_uses_is_given_back_before_anything_is_evicted(
        self, folder: Path, open_disk: Open
    ) -> None:
        """Tenants that came when there were few have large segments with one block each."""
        tier = open_disk(16 * MIB)
        early = [block("early", tenant) for tenant in tenants(8)]
        for item in early:
            tier.write([item])
        preallocated = used_bytes(folder)
        assert preallocated > 2 * MIB
        late = [block(i) for i in range(1000)]  # three pages each, and a head for sixteen
        for start in range(0, len(late), 16):
            assert tier.write(late[start : start + 16]) == [WriteStatus.STORED] * len(late[start : start + 16])
        assert preallocated + len(late) * 3 * PAGE > 0.87 * 16 * MIB
        assert found(tier, early + late) == [True] * (len(early) + len(late))

    def test_all_that_write_keep_a_fair_share(self, folder: Path, open_disk: Open) -> None:
        tier = open_disk(8 * MIB)
        everybody = tenants(20)
        for i in range(60):
            for tenant in everybody:
                assert tier.write([block(i, tenant)]) == [WriteStatus.STORED]
            assert used_bytes(folder) <= 8 * MIB
        shares = [tier.usage_of(tenant).num_blocks for tenant in everybody]
        fair = 8 * MIB // (20 * 4 * PAGE)  # a page of head to three of payload
        assert fair // 2 < min(shares) <= max(shares) <= 1.5 * fair
        newest = [block(i, tenant) for i in range(50, 60) for tenant in everybody]
        assert found(tier, newest) == [True] * len(newest)
        assert len(segments(folder)) <= 20 * 20

    def test_one_of_many_has_larger_segments_as_it_has_more(self, folder: Path, open_disk: Open) -> None:
        tier = open_disk(64 * MIB)
        small = [block("small", tenant) for tenant in tenants(200)]
        for item in small:
            tier.write([item])
        before = len(segments(folder))
        large = [block(i, nbytes=120 * KIB) for i in range(400)]
        for item in large:
            assert tier.write([item]) == [WriteStatus.STORED]
        assert found(tier, large[-300:]) == [True] * 300
        assert found(tier, small) == [True] * len(small)
        assert len(segments(folder)) - before < 120

    def test_a_share_is_what_was_written_and_not_what_was_preallocated(self) -> None:
        full, roomy = tenants(2)
        state = SegmentSet()
        for number, tenant, num_pages, taken in ((1, full, 40, 30), (2, roomy, 100, 20)):
            state.set_aside(num_pages * PAGE)
            state.add(Segment(SegmentId(number, tenant, bytes(NONCE_BYTES)), num_pages), from_aside=True)
            extent = state.take(tenant, 1, taken, 1)
            assert extent is not None
            extent.segment.in_flight -= 1
        victim = state.victim()
        assert victim is not None
        assert victim.id.tenant == full
        assert state.taken_bytes_of(full) > state.taken_bytes_of(roomy)
        assert state.roomiest(4 * MIB) is state.find(2)
        assert state.roomiest(400 * MIB) is None, "with so much capacity it may have that much open"
        state.check(0)


class TestLessCapacity:
    def test_than_before_and_tombstones_that_are_needed_in_the_oldest_segment(
        self, folder: Path, open_disk: Open
    ) -> None:
        """A batch over many segments is under way while older blocks are discarded: its records are older than that."""
        reached, go_on = threading.Event(), threading.Event()

        class Halting(OsFiles):
            armed = False

            def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
                if self.armed and offset and not reached.is_set():
                    reached.set()
                    assert go_on.wait(20)
                super().write(fd, buffers, offset)

        files = Halting(direct=False)
        tier = open_disk(4 * MIB, files=files, num_threads=1)
        old = [block(i) for i in range(20)]
        tier.write(old)
        files.armed = True
        with ThreadPoolExecutor(1) as executor:
            writing = executor.submit(tier.write, [block(("batch", i), nbytes=40_000) for i in range(60)])
            assert reached.wait(20)
            assert tier.discard([key for key, _, _ in old[:3]]) == 3
            go_on.set()
            assert writing.result(20) == [WriteStatus.STORED] * 60
        for capacity_bytes in (2 * MIB, MIB):
            tier = open_disk(capacity_bytes)
            assert used_bytes(folder) <= capacity_bytes
            assert found(tier, old[:3]) == [False] * 3
            for i in range(100):
                assert tier.write([block((capacity_bytes, i))]) == [WriteStatus.STORED]
            assert used_bytes(folder) <= capacity_bytes

    def test_than_before_and_nothing_can_be_removed(
        self, folder: Path, open_disk: Open, caplog: pytest.LogCaptureFixture
    ) -> None:
        items = [block(i) for i in range(200)]
        assert open_disk(4 * MIB, segment_bytes=64 * KIB).write(items) == [WriteStatus.STORED] * len(items)
        files = Unremovable(1, 2**32, cut=False)
        tier = open_disk(MIB, segment_bytes=64 * KIB, files=files)
        assert "above the capacity cannot be removed" in caplog.text
        assert sum(found(tier, items)) > 170, "what can be read is read, but for what was to be removed first"
        before = used_bytes(folder)
        assert tier.write([block("new")])[0] in (WriteStatus.FULL, WriteStatus.FAILED)
        assert used_bytes(folder) == before
        files.numbers = ()
        tier = open_disk(MIB, segment_bytes=64 * KIB)
        assert used_bytes(folder) <= MIB
        assert tier.write([block("new")]) == [WriteStatus.STORED]


class TestFilesThatStay:
    def test_hold_up_nobody_and_are_removed_when_they_can_be(
        self, folder: Path, open_disk: Open, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        files = Unremovable(1, 3, cut=False)
        tier = open_disk(MIB, files=files, segment_bytes=64 * KIB)
        statuses = [tier.write([block(i)])[0] for i in range(300)]
        assert statuses.count(WriteStatus.STORED) > 290
        assert statuses[-100:] == [WriteStatus.STORED] * 100
        tier.check()
        assert tier.usage().used_bytes == used_bytes(folder) <= MIB
        assert {path.stem for path in segments(folder)} >= {"00000001", "00000002", "00000003"}
        files.numbers = ()
        monkeypatch.setattr(tier._parts.state.segments, "_clock", lambda: 1e12)
        for i in range(10):
            assert tier.write([block((i, "more"))]) == [WriteStatus.STORED]
        assert not {path.stem for path in segments(folder)} & {"00000001", "00000002", "00000003"}

    def test_with_nothing_in_them_take_a_page_each(self, folder: Path, open_disk: Open) -> None:
        files = Unremovable(1, 20, cut=True)
        tier = open_disk(MIB, files=files, segment_bytes=64 * KIB)
        for i in range(300):
            assert tier.write([block(i)]) == [WriteStatus.STORED]
        empty = [path for path in segments(folder) if not path.stat().st_size]
        assert len(empty) == 20
        tier.check()
        assert tier.usage().used_bytes == used_bytes(folder) + 20 * PAGE <= MIB
        there = [tier.lookup([make_key(i)]) == [Status.HIT] for i in range(300)]
        tier = open_disk(MIB, files=files, segment_bytes=64 * KIB)
        assert [tier.lookup([make_key(i)]) == [Status.HIT] for i in range(300)] == there
        assert tier.write([block("new")]) == [WriteStatus.STORED]

    def test_since_the_file_system_is_read_only_are_read(self, folder: Path, open_disk: Open) -> None:
        files = Unremovable(cut=False)
        tier = open_disk(4 * MIB, files=files, segment_bytes=64 * KIB)
        items = [block(i) for i in range(230)]
        tier.write(items)
        num_before = sum(found(tier, items))
        files.numbers = (1, 2**32)
        statuses = {tier.write([block((i, "more"))])[0] for i in range(200)}
        assert WriteStatus.FAILED in statuses
        assert tier.state is TierState.READ_ONLY
        assert sum(found(tier, items)) > num_before // 2
