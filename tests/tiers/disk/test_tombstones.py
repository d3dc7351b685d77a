"""What a disk tier was told to forget stays forgotten: tombstones, where they can be written, and what needs them."""

import errno
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from disk_forgetting_rig import SMALL, WAIT_S, Forget, Held, discard, found, items, purge
from disk_log_rig import BLUE, KIB, MIB, NBYTES, block, there
from disk_rig import contents, flip, killed, opened, segments
from kvtier.identity.keys import TenantId
from kvtier.testing.blocks import TENANT, make_key, make_payload, read_blocks, summed
from kvtier.testing.faults import FaultyFiles
from kvtier.tiers.base import Status, WriteStatus
from kvtier.tiers.disk.log.format import PAGE
from kvtier.tiers.disk.medium.files import OsFiles
from kvtier.tiers.disk.operations import tombstones as forgetting


class TestForgetting:
    def test_outlives_a_kill_and_its_own_segment(self, tmp_path: Path) -> None:
        folder = tmp_path / "disk"
        with opened(folder, segment_bytes=64 * KIB) as tier:
            tier.write([block(i) for i in range(8)])
            assert tier.discard([make_key(i) for i in (1, 3)]) == 2
            killed(folder, tmp_path / "copy")
            for i in range(100, 160):
                tier.write([block(i)])
        expected = [i not in (1, 3) for i in range(8)]
        assert there(tmp_path / "copy", range(8)) == expected
        assert there(folder, range(8)) == expected

    def test_and_writing_again(self, tmp_path: Path) -> None:
        folder = tmp_path / "disk"
        with opened(folder) as tier:
            for _ in range(3):
                tier.write([block("a"), block("b")])
                tier.discard([make_key("a")])
            tier.write([block("a")])
            tier.discard([make_key("b")])
            killed(folder, tmp_path / "copy")
        assert there(folder, "ab") == there(tmp_path / "copy", "ab") == [True, False]

    def test_a_purge_takes_one_tenant_and_its_files(self, tmp_path: Path) -> None:
        folder = tmp_path / "disk"
        blue = [summed(make_key(i, tenant=BLUE), make_payload(i, NBYTES)) for i in range(30)]
        with opened(folder, segment_bytes=64 * KIB) as tier:
            tier.write(blue)
            tier.write([block(i) for i in range(30)])
            assert tier.purge(BLUE) == 30
            assert tier.purge(BLUE) == 0
            assert tier.usage_of(BLUE).used_bytes == 0
            killed(folder, tmp_path / "copy")
            assert tier.lookup([key for key, _, _ in blue]) == [Status.MISS] * 30
        assert {contents(path).segment.tenant for path in segments(folder)} == {TENANT}
        assert there(tmp_path / "copy", range(30)) == [True] * 30

    def test_a_purge_that_was_cut_short_is_a_purge(self, tmp_path: Path) -> None:
        """The tombstone is there, the files still are too."""
        folder = tmp_path / "disk"
        files = FaultyFiles(OsFiles(direct=False))
        with opened(folder, segment_bytes=64 * KIB, files=files) as tier:
            tier.write([block(i) for i in range(30)])
            files.fail_next("remove", errno.EIO, times=100)
            files.fail_next("truncate", errno.EIO, times=100)
            tier.purge(TENANT)
            copy = killed(folder, tmp_path / "copy")
        assert len(segments(copy)) > 2
        assert there(copy, range(30)) == [False] * 30

    def test_without_room_for_a_tombstone_takes_the_segment(self, tmp_path: Path) -> None:
        folder = tmp_path / "disk"
        files = FaultyFiles(OsFiles(direct=False))
        with opened(folder, files=files, num_threads=1) as tier:
            tier.write([block(0), block(1)])
            # The tombstone, the footer of its segment, and the header of the next one.
            files.fail_next("write", errno.EIO, times=3)
            assert tier.discard([make_key(0)]) == 1
            assert tier.lookup([make_key(0), make_key(1)]) == [Status.MISS] * 2
            copy = killed(folder, tmp_path / "copy")
        assert there(copy, [0])[0] is False

    def test_copies_that_were_moved_are_forgotten_too(self, tmp_path: Path) -> None:
        folder = tmp_path / "disk"
        with opened(folder, MIB, segment_bytes=64 * KIB) as tier:
            for i in range(300):
                tier.write([block(i)])
                read_blocks(tier, [make_key(0)], NBYTES)
            assert tier.lookup([make_key(0)]) == [Status.HIT]
            assert tier.write_amplification() > 1
            tier.discard([make_key(0)])
            copy = killed(folder, tmp_path / "copy")
        assert there(copy, [0]) == there(folder, [0]) == [False]


class TestCopiesThatTheIndexDoesNotHave:
    """What is discarded later must be forgotten there, too."""

    @pytest.mark.parametrize("sealed", [False, True])
    def test_of_a_block_that_was_dropped_without_a_tombstone(self, tmp_path: Path, sealed: bool) -> None:
        files = FaultyFiles(OsFiles(direct=False))
        with opened(tmp_path / "disk", files=files) as tier:
            tier.write(items(range(3)))
            if sealed:
                tier._parts.log.retire_all()
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
                tier._parts.state.index.records(tier._parts.state.index.find(tier._parts.state.tags([make_key(0)])))[
                    "segment"
                ]
            )
            assert number > 1
            with tier._parts.state.lock:
                newest = tier._parts.state.segments.mark(
                    next(s for s in tier._parts.state.segments if s.number == number)
                )
            assert tier._parts.space.evict(newest)
            assert found(tier, labels) == 0
            tier.discard([make_key(i) for i in labels])
            again = killed(copy, tmp_path / "again")
        for folder in (again, copy):
            with opened(folder, 2 * MIB) as tier:
                assert found(tier, labels) == 0


def test_a_block_whose_write_failed_and_had_landed_is_forgotten_although_its_footer_is_lost(tmp_path: Path) -> None:
    """The footer does not list it. Without the footer, the scan finds it."""

    class LandsAndFails(OsFiles):
        armed = False

        def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
            super().write(fd, buffers, offset)
            if self.armed:
                self.armed = False
                raise OSError(errno.EIO, os.strerror(errno.EIO))

    folder, files = tmp_path / "disk", LandsAndFails(direct=False)
    with opened(folder, files=files) as tier:
        tier.write(items(["sound"]))
        files.armed = True
        assert tier.write(items(["failed"])) == [WriteStatus.FAILED]
        tier.check()
        assert tier.discard([make_key("failed")]) == 0
    (path, *_) = segments(folder)
    flip(path, path.stat().st_size - PAGE + 100)
    with opened(folder) as tier:
        assert found(tier, ["sound", "failed"]) == 1
        assert found(tier, ["sound"]) == 1


def test_a_tombstone_that_cannot_be_written_costs_other_tenants_nothing(tmp_path: Path) -> None:
    """One call forgets blocks of two tenants, and the tombstones of one fail."""

    class NoTombstones(OsFiles):
        tenant = b""

        def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
            head = bytes(buffers[0][:40])
            if head.startswith(b"KVTEXTNT") and head.endswith(self.tenant) and sum(map(len, buffers)) == PAGE:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            super().write(fd, buffers, offset)

    files = NoTombstones(direct=False)
    files.tenant = b"nobody"
    of_blue = [summed(make_key(i, tenant=BLUE), make_payload(i, SMALL)) for i in range(4)]
    with opened(tmp_path / "disk", files=files) as tier:
        tier.write(items(range(4)))
        tier.write(of_blue)
        files.tenant = bytes(TENANT)
        assert tier.discard([make_key(0), of_blue[0][0]]) == 2
        assert found(tier, range(4)) == 0
        assert tier.lookup([key for key, _, _ in of_blue]) == [Status.MISS] + [Status.HIT] * 3


def test_a_purge_of_a_tenant_without_anything_leaves_nothing_behind(tmp_path: Path) -> None:
    with opened(tmp_path / "disk") as tier:
        for i in range(3):
            assert tier.purge(TenantId(bytes([i]) * len(TENANT))) == 0
        assert not tier._parts.state.purged
        assert segments(tmp_path / "disk") == []


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
        (first,) = tier._parts.state.segments
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
        tier.check()
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
        (old,) = tier._parts.state.segments
        for i in range(6):
            tier.write(items([("fill", i)], 40_000))
        tier.discard([make_key(1), make_key(3)])
        with tier._parts.state.lock:
            holder = next(s for s in tier._parts.state.segments if s.last_forget)
            tier._parts.state.segments.mark(holder)
        assert holder is not old
        tier._parts.log.retire_all()
        assert tier._parts.space.evict(holder)
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
