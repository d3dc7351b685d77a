"""A disk tier on a medium that fails: answers and counters instead of exceptions, and never a wrong byte."""

import errno
import itertools
import logging
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from disk_rig import segments, used_bytes
from disk_tier_rig import KIB, MIB, NBYTES, Open, block, load, loaded, reopening, value
from kvtier.codec.stored_form import Codec
from kvtier.events import Event, EventKind, TierState
from kvtier.metrics import Metrics
from kvtier.testing.contract import make_key, read_blocks, tier_state_machine
from kvtier.testing.faults import FaultyFiles
from kvtier.tiers.base import Status, WriteStatus
from kvtier.tiers.disk.medium import health as health
from kvtier.tiers.disk.medium.files import OsFiles, supports_direct
from kvtier.tiers.disk.tier import DiskTier


@pytest.fixture
def open_disk(tmp_path: Path) -> Iterator[Open]:
    with reopening(tmp_path / "disk") as open_one:
        yield open_one


def states(metrics: Metrics) -> list[float]:
    return [value(metrics, "kvtier_tier_state", state=state.value) for state in TierState]


class TestFailingWrites:
    def test_count_the_space_of_a_file_that_could_be_neither_begun_nor_removed(
        self, tmp_path: Path, open_disk: Open
    ) -> None:
        files = FaultyFiles(OsFiles(direct=False))
        tier = open_disk(files=files)
        for op in ("write", "truncate", "remove"):
            files.fail_next(op, errno.EIO)
        assert tier.write([block("a")]) == [WriteStatus.FAILED]
        assert tier.usage().used_bytes == used_bytes(tmp_path / "disk") > 0
        assert tier.write([block("a")]) == [WriteStatus.STORED]

    def test_count_the_space_of_a_file_that_could_be_neither_filled_nor_removed(
        self, tmp_path: Path, open_disk: Open, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(fd: int, offset: int, nbytes: int) -> None:
            os.ftruncate(fd, nbytes)  # some of it was had
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def stays(path: str) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        files = FaultyFiles(OsFiles(direct=False))
        tier = open_disk(files=files)
        with monkeypatch.context() as patched:
            patched.setattr(os, "posix_fallocate", full)
            patched.setattr(os, "unlink", stays)
            files.fail_next("truncate", errno.EIO)
            assert tier.write([block("a")]) == [WriteStatus.FULL], "what fallocate said, not what came of it"
        assert tier.usage().used_bytes == used_bytes(tmp_path / "disk") > 0
        assert tier.write([block("a")]) == [WriteStatus.STORED]

    @pytest.mark.parametrize(
        ("op", "code", "status"),
        [
            ("create", errno.ENOSPC, WriteStatus.FULL),
            ("create", errno.EDQUOT, WriteStatus.FULL),
            ("create", errno.EIO, WriteStatus.FAILED),
            ("write", errno.ENOSPC, WriteStatus.FULL),
            ("write", errno.EIO, WriteStatus.FAILED),
            ("free_bytes", errno.EIO, WriteStatus.FAILED),
        ],
    )
    def test_are_answers_and_leave_nothing(
        self, tmp_path: Path, open_disk: Open, op: str, code: int, status: WriteStatus
    ) -> None:
        metrics = Metrics()
        files = FaultyFiles(OsFiles(direct=False))
        tier = open_disk(files=files, metrics=metrics)
        files.fail_next(op, code)
        assert tier.write([block("a")]) == [status]
        assert tier.lookup([make_key("a")]) == [Status.MISS]
        assert tier.usage().used_bytes == 0
        assert segments(tmp_path / "disk") == []
        assert value(metrics, "kvtier_io_errors_total", op="write", error=errno.errorcode[code]) == 1
        assert tier.write([block("a")]) == [WriteStatus.STORED]

    def test_of_payloads_leave_what_is_there(self, open_disk: Open) -> None:
        files = FaultyFiles(OsFiles(direct=False))
        tier = open_disk(files=files)
        tier.write([block("a")])
        files.fail_next("write", errno.EIO)
        assert tier.write([block("b")]) == [WriteStatus.FAILED]
        assert tier.write([block("b")]) == [WriteStatus.STORED]
        assert loaded(tier, "ab") == [True, True]
        assert loaded(open_disk(), "ab") == [True, True]

    def test_do_not_flood_the_log(self, open_disk: Open, caplog: pytest.LogCaptureFixture) -> None:
        files = FaultyFiles(OsFiles(direct=False))
        tier = open_disk(files=files)
        files.fail_next("create", errno.ENOSPC, times=5)
        with caplog.at_level(logging.WARNING):
            assert [tier.write([block(i)]) for i in range(5)] == [[WriteStatus.FULL]] * 5
        assert len(caplog.records) == 1
        assert "No space left" in caplog.text

    def test_one_after_another_make_the_tier_read_only(self, open_disk: Open, caplog: pytest.LogCaptureFixture) -> None:
        metrics = Metrics()
        events: list[Event] = []
        files = FaultyFiles(OsFiles(direct=False))
        tier = open_disk(files=files, metrics=metrics, on_event=events.append)
        tier.write([block("a")])
        assert (tier.state, states(metrics)) == (TierState.WRITABLE, [1, 0, 0])
        files.fail_next("write", errno.EIO, times=1000)
        assert {tier.write([block(i)])[0] for i in range(40)} == {WriteStatus.FAILED}
        assert (tier.state, states(metrics)) == (TierState.READ_ONLY, [0, 1, 0])
        assert [event.kind for event in events] == [EventKind.STORED, EventKind.READ_ONLY]
        assert events[-1] == Event(EventKind.READ_ONLY, "disk")
        assert tier.write([block("a")]) == [WriteStatus.EXISTS]
        assert load(tier, "a") == block("a")[1]
        assert value(metrics, "kvtier_tier_degraded_total", state="read_only") == 1
        assert value(metrics, "kvtier_io_errors_total", op="write", error="EIO") < 20, "it was left alone"
        assert "is read-only" in caplog.text

    def test_that_work_again_make_it_writable(self, open_disk: Open, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(health, "_PAUSE_S", 0.01)
        metrics = Metrics()
        kinds: list[EventKind] = []
        files = FaultyFiles(OsFiles(direct=False))
        tier = open_disk(files=files, metrics=metrics, on_event=lambda event: kinds.append(event.kind))
        files.fail_next("create", errno.ENOSPC, times=10)
        labels = itertools.count()
        deadline = time.monotonic() + 20
        while tier.write([block(next(labels))]) != [WriteStatus.STORED]:
            assert time.monotonic() < deadline
        assert kinds == [EventKind.READ_ONLY, EventKind.STORED, EventKind.WRITABLE]
        assert (tier.state, states(metrics)) == (TierState.WRITABLE, [1, 0, 0])

    def test_of_a_footer_cost_nothing(self, tmp_path: Path, open_disk: Open) -> None:
        files = FaultyFiles(OsFiles(direct=False))
        tier = open_disk(files=files)
        tier.write([block("a"), block("b")])
        files.fail_next("truncate", errno.EIO)
        files.fail_next("write", errno.EIO)
        assert loaded(open_disk(), "ab") == [True, True]

    def test_that_nobody_hears_of_are_misses(self, open_disk: Open) -> None:
        metrics = Metrics()
        files = FaultyFiles(OsFiles(direct=False))
        tier = open_disk(files=files, metrics=metrics)
        tier.write([block("a")])
        files.lose_next()
        assert tier.write([block("b"), block("c")]) == [WriteStatus.STORED] * 2
        assert loaded(tier, "abc")[::2] == [True, False]
        assert value(metrics, "kvtier_corrupt_blocks_total") >= 1

    def test_short_ones_are_gone_on_with(self, open_disk: Open, monkeypatch: pytest.MonkeyPatch) -> None:
        pwritev, preadv = os.pwritev, os.preadv
        monkeypatch.setattr(os, "pwritev", lambda fd, buffers, at: pwritev(fd, [buffers[0][:4096]], at))
        monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: preadv(fd, [buffers[0][:4096]], at))
        tier = open_disk(files=OsFiles(direct=False))
        tier.write([block("a"), block("b")])
        assert loaded(tier, "ab") == [True, True]


class TestFailingReads:
    def test_an_unreadable_sector_is_dropped_and_a_passing_error_is_not(self, open_disk: Open) -> None:
        metrics = Metrics()
        files = FaultyFiles(OsFiles(direct=False))
        tier = open_disk(files=files, metrics=metrics)
        tier.write([block("a"), block("b")])
        files.fail_next("read", errno.EIO)
        assert load(tier, "a") is None
        assert tier.lookup([make_key("a")]) == [Status.MISS]
        files.fail_next("read", errno.EMFILE)
        assert load(tier, "b") is None
        assert load(tier, "b") == block("b")[1]
        assert value(metrics, "kvtier_io_errors_total", op="read", error="EIO") == 1
        assert value(metrics, "kvtier_io_errors_total", op="read", error="EMFILE") == 1
        assert loaded(open_disk(), "ab") == [False, True], "what was dropped stays gone"

    def test_one_bad_block_does_not_take_its_neighbours(self, open_disk: Open) -> None:
        files = FaultyFiles(OsFiles(direct=False))
        tier = open_disk(files=files)
        tier.write([block(i) for i in range(3)])
        files.fail_next("read", errno.EIO, times=2)  # all together, then the first by itself
        assert loaded(tier, range(3)) == [False, True, True]

    @pytest.mark.parametrize("code", [errno.ENODATA, errno.EUCLEAN, errno.EBADMSG, errno.EACCES])
    def test_what_cannot_be_read_can_be_written_again(self, open_disk: Open, code: int) -> None:
        metrics = Metrics()
        files = FaultyFiles(OsFiles(direct=False))
        tier = open_disk(files=files, metrics=metrics)
        tier.write([block("a")])
        files.fail_next("read", code)
        assert load(tier, "a") is None
        assert value(metrics, "kvtier_io_errors_total", op="read", error=errno.errorcode[code]) == 1
        assert tier.write([block("a")]) == [WriteStatus.STORED]
        assert load(tier, "a") == block("a")[1]

    def test_one_after_another_switch_the_tier_off(self, open_disk: Open, caplog: pytest.LogCaptureFixture) -> None:
        metrics = Metrics()
        events: list[Event] = []
        files = FaultyFiles(OsFiles(direct=False))
        tier = open_disk(files=files, metrics=metrics, on_event=events.append, segment_bytes=64 * KIB)
        for i in range(80):
            tier.write([block(i)])
        files.fail_next("read", errno.EIO, times=1000)
        assert loaded(tier, range(70)) == [False] * 70
        kinds = [event.kind for event in events]
        assert (kinds.count(EventKind.CLEARED), kinds.count(EventKind.OFF)) == (1, 1)
        assert (tier.state, states(metrics)) == (TierState.OFF, [0, 0, 1])
        assert tier.lookup([make_key(i) for i in range(80)]) == [Status.MISS] * 80
        assert value(metrics, "kvtier_tier_degraded_total", state="off") == 1
        assert "is off" in caplog.text
        assert tier.write([block("new")]) == [WriteStatus.FAILED]
        tier._parts.health.wrote()  # one that was under way
        assert tier.state is TierState.OFF

    @pytest.mark.parametrize("direct", [False, True])
    @pytest.mark.parametrize("what", ["FIFO", "link", "folder"])
    def test_something_else_in_the_place_of_a_segment_holds_nobody_up(
        self, tmp_path: Path, open_disk: Open, what: str, direct: bool
    ) -> None:
        tier = open_disk(files=OsFiles(direct=direct and supports_direct(str(tmp_path))))
        tier.write([block("a")])
        tier._parts.files.descriptors.forget(1)  # as if others had been used since
        (path,) = segments(tmp_path / "disk")
        moved = path.rename(tmp_path / "elsewhere")
        {"FIFO": os.mkfifo, "link": lambda path: path.symlink_to(moved), "folder": os.mkdir}[what](path)
        assert load(tier, "a") is None
        assert tier.lookup([make_key("a")]) == [Status.MISS]
        assert tier.write([block("a")])[0] in (WriteStatus.STORED, WriteStatus.FAILED)
        assert moved.stat().st_size > NBYTES, "nobody followed the link to remove it"


def test_a_deleted_segment_is_a_counted_miss(tmp_path: Path, open_disk: Open) -> None:
    metrics = Metrics()
    tier = open_disk(metrics=metrics)
    tier.write([block("a")])
    tier._parts.files.descriptors.forget(1)  # as if others had been used since
    segments(tmp_path / "disk")[0].unlink()
    assert load(tier, "a") is None
    assert tier.lookup([make_key("a")]) == [Status.MISS]
    assert value(metrics, "kvtier_io_errors_total", op="read", error="ENOENT") == 1


def test_space_of_a_file_that_cannot_be_removed_stays_counted(tmp_path: Path, open_disk: Open) -> None:
    files = FaultyFiles(OsFiles(direct=False))
    tier = open_disk(256 * KIB, files=files)
    files.fail_next("remove", errno.EROFS, times=10_000)
    statuses = [tier.write([block(i)])[0] for i in range(100)]
    assert statuses[-1] is WriteStatus.FULL
    assert tier.usage().used_bytes <= 256 * KIB
    tier.check()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_failing_disk_forgets_but_never_lies(tmp_path: Path, open_disk: Open, seed: int) -> None:
    tier = open_disk(MIB, files=FaultyFiles(OsFiles(direct=False), seed=seed, probability=0.02))
    order = random.Random(seed)
    num_hits = 0
    for _ in range(60):
        batch = [order.randrange(60) for _ in range(8)]
        assert set(tier.write([block(i) for i in batch])) <= set(WriteStatus)
        found = read_blocks(tier, [make_key(i) for i in batch], NBYTES)
        assert all(payload in (None, block(i)[1]) for i, payload in zip(batch, found, strict=True))
        num_hits += sum(payload is not None for payload in found)
        tier.check()
    assert num_hits > 200
    tier = open_disk(MIB)
    assert all(load(tier, i) in (None, block(i)[1]) for i in range(60))


def test_states_of_a_failing_disk_that_changes_its_codec(tmp_path: Path) -> None:
    """A disk that fails by chance, with one codec in one life and another in the next."""
    lives = itertools.count()

    def open_again(capacity_bytes: int) -> DiskTier:
        number = next(lives)
        files = FaultyFiles(OsFiles(direct=False), seed=number, probability=0.1)
        return DiskTier.open(
            tmp_path / "disk", capacity_bytes, reserve_bytes=0, codec=Codec(number % len(Codec)), files=files
        )

    machine = tier_state_machine(open_again, packable=True, persistent=True, forgets_for_good=False, max_examples=20)
    machine.TestCase().runTest()
