"""The disk tier's promises: the contract, faults of the medium, room, events, threads."""

import errno
import itertools
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from disk_rig import place_of, segments, used_bytes
from kvtier.codec import HEADER_BYTES, Codec, parse_stored_header
from kvtier.errors import ConfigError, InvalidInputError
from kvtier.events import Event, EventKind, TierState
from kvtier.keys import StoreKey, tenant_id
from kvtier.metrics import Metrics
from kvtier.testing.blocks import TENANT, make_packable_payload
from kvtier.testing.contract import MakeTier, TierContract, make_key, make_payload, read_blocks, tier_state_machine
from kvtier.testing.faults import FaultyFiles
from kvtier.tiers.base import Status, WriteStatus
from kvtier.tiers.disk import DiskTier
from kvtier.tiers.disk_log import trouble
from kvtier.tiers.disk_log.folder import MARKER
from kvtier.tiers.disk_log.segment_files import SyncPolicy
from kvtier.tiers.files import FileLayer, OsFiles, supports_direct

KIB, MIB = 2**10, 2**20
NBYTES = 10_000
BLOCK_PAGES = 3
"""Pages of a payload of NBYTES."""
BLUE = tenant_id("blue")

Open = Callable[..., DiskTier]


@pytest.fixture
def open_disk(tmp_path: Path) -> Iterator[Open]:
    """Opens (again) the one disk tier of the test; checks and closes what is open at the end."""
    opened: list[DiskTier] = []

    def open_one(capacity_bytes: int = 4 * MIB, *, metrics: Metrics | None = None, **options: object) -> DiskTier:
        while opened:
            opened.pop().close()
        options.setdefault("reserve_bytes", 0)
        tier = DiskTier.open(tmp_path / "disk", capacity_bytes, metrics=metrics, **options)  # type: ignore[arg-type]
        opened.append(tier)
        return tier

    yield open_one
    for tier in opened:
        tier.check()
        tier.close()


class TestDisk(TierContract):
    persistent = True

    @pytest.fixture
    def make_tier(self, tmp_path: Path) -> MakeTier:
        return lambda capacity_bytes: DiskTier.open(tmp_path / "disk", capacity_bytes, reserve_bytes=0)


class TestBufferedDisk(TierContract):
    persistent = True
    payload_bytes = 7003

    @pytest.fixture
    def make_tier(self, tmp_path: Path) -> MakeTier:
        files = OsFiles(direct=False)
        return lambda capacity_bytes: DiskTier.open(tmp_path / "disk", capacity_bytes, reserve_bytes=0, files=files)


class TestPackingDisk(TierContract):
    persistent = True
    packs = True

    @pytest.fixture
    def make_tier(self, tmp_path: Path) -> MakeTier:
        return lambda capacity_bytes: DiskTier.open(tmp_path / "disk", capacity_bytes, reserve_bytes=0, codec=Codec.LZ4)


class TestSyncedDisk(TierContract):
    persistent = True

    @pytest.fixture
    def make_tier(self, tmp_path: Path) -> MakeTier:
        return lambda capacity_bytes: DiskTier.open(
            tmp_path / "disk", capacity_bytes, reserve_bytes=0, sync=SyncPolicy.BATCH
        )


def test_direct_access_is_used_where_the_file_system_has_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
        expected = True
    except OSError:
        expected = False
    path.unlink()
    assert supports_direct(str(tmp_path)) == expected
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("codec", Codec)
def test_states_against_a_dict(tmp_path: Path, codec: Codec) -> None:
    machine = tier_state_machine(
        lambda capacity_bytes: DiskTier.open(tmp_path / "disk", capacity_bytes, reserve_bytes=0, codec=codec),
        packable=True,
        persistent=True,
        max_examples=20,
    )
    machine.TestCase().runTest()


def test_states_of_a_failing_disk_that_changes_its_codec(tmp_path: Path) -> None:
    """A disk that fails by chance, with one codec in one life and the other in the next."""
    lives = itertools.count()

    def open_again(capacity_bytes: int) -> DiskTier:
        number = next(lives)
        files = FaultyFiles(OsFiles(direct=False), seed=number, probability=0.1)
        return DiskTier.open(tmp_path / "disk", capacity_bytes, reserve_bytes=0, codec=Codec(number % 2), files=files)

    machine = tier_state_machine(open_again, packable=True, persistent=True, forgets_for_good=False, max_examples=20)
    machine.TestCase().runTest()


def block(label: object) -> tuple[StoreKey, bytes]:
    return make_key(label), make_payload(label, NBYTES)


def load(tier: DiskTier, label: object) -> bytes | None:
    return read_blocks(tier, [make_key(label)], NBYTES)[0]


def loaded(tier: DiskTier, labels: Sequence[object]) -> list[bool]:
    return [found is not None for found in read_blocks(tier, [make_key(i) for i in labels], NBYTES)]


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(name, {"tier": "disk", **labels}) or 0.0


def states(metrics: Metrics) -> list[float]:
    return [value(metrics, "kvtier_tier_state", state=state.value) for state in TierState]


def header_of(folder: Path, label: object) -> bytes:
    """The last that stands in its segment."""
    path, _, _ = place_of(folder, make_key(label))
    data = path.read_bytes()
    return data[data.rindex(make_key(label)) - 8 :][:HEADER_BYTES]


class TestCodec:
    def test_a_packed_block_takes_less(self, tmp_path: Path, open_disk: Open) -> None:
        tier = open_disk(codec=Codec.LZ4)
        key, payload = make_key("packed"), make_packable_payload("packed", 64 * 1024)
        tier.write([(key, payload), block("noise")])
        assert read_blocks(tier, [key], len(payload)) == [payload]
        assert place_of(tmp_path / "disk", key)[2] < 48 * 1024
        assert parse_stored_header(header_of(tmp_path / "disk", "packed")).codec is Codec.LZ4
        assert parse_stored_header(header_of(tmp_path / "disk", "noise")).codec is Codec.RAW, "it gains nothing"

    def test_a_folder_of_both_is_read_whatever_is_written(self, open_disk: Open) -> None:
        payloads = {make_key(codec): make_packable_payload(codec, NBYTES) for codec in Codec}
        for codec, item in zip(Codec, payloads.items(), strict=True):
            assert open_disk(codec=codec).write([item]) == [WriteStatus.STORED]
        for codec in Codec:
            assert read_blocks(open_disk(codec=codec), list(payloads), NBYTES) == list(payloads.values())


def test_neighbours_are_read_at_once(tmp_path: Path, open_disk: Open) -> None:
    num_reads = 0

    class Counting(OsFiles):
        def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            nonlocal num_reads
            num_reads += 1
            return super().read(fd, buffers, offset)

    tier = open_disk(files=Counting(direct=False))
    tier.write([block(i) for i in range(4)])
    assert read_blocks(tier, [make_key(i) for i in (3, 1, 0, 2)], NBYTES) == [block(i)[1] for i in (3, 1, 0, 2)]
    assert num_reads == 1


class TestRoom:
    def test_files_never_take_more_than_the_capacity(self, tmp_path: Path, open_disk: Open) -> None:
        capacity_bytes = MIB
        seen: list[int] = []
        one_at_a_time = threading.Lock()

        class Weighed(OsFiles):
            """Weighs the folder after each change, before the next."""

            def create(self, path: str, nbytes: int) -> int:
                with one_at_a_time:
                    fd = super().create(path, nbytes)
                    seen.append(used_bytes(tmp_path / "disk"))
                    return fd

            def truncate(self, fd: int, nbytes: int) -> None:
                with one_at_a_time:
                    super().truncate(fd, nbytes)

            def remove(self, path: str) -> None:
                with one_at_a_time:
                    super().remove(path)

        tier = open_disk(capacity_bytes, files=Weighed(direct=False))
        with ThreadPoolExecutor(4) as executor:
            list(executor.map(lambda i: tier.write([block((i, j)) for j in range(3)]), range(60)))
        assert capacity_bytes // 2 <= max(seen) <= capacity_bytes
        tier.check()  # what is being sealed has been cut then
        assert tier.usage().used_bytes == used_bytes(tmp_path / "disk")
        assert tier.write([(make_key("large"), bytes(capacity_bytes))]) == [WriteStatus.FULL]
        assert tier.usage().num_blocks > 0

    def test_a_payload_larger_than_a_segment_gets_one_of_its_own(self, tmp_path: Path, open_disk: Open) -> None:
        tier = open_disk(MIB)
        payload = make_payload("large", 300 * KIB)
        assert tier.write([(make_key("large"), payload), block("a")]) == [WriteStatus.STORED] * 2
        assert read_blocks(tier, [make_key("large")], len(payload)) == [payload]
        assert load(tier, "a") == block("a")[1]

    def test_the_tier_shrinks_to_leave_the_reserve_free(
        self, tmp_path: Path, open_disk: Open, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Roomy(OsFiles):
            """A file system with as much free space as the test says."""

            size_bytes = 2 * MIB

            def free_bytes(self, directory: str) -> int:
                return self.size_bytes - used_bytes(Path(directory))

        files = Roomy(direct=False)
        tier = open_disk(4 * MIB, files=files, reserve_bytes=MIB, segment_bytes=64 * KIB)
        for i in range(120):
            assert tier.write([block(i)]) == [WriteStatus.STORED]
        assert 900 * KIB <= used_bytes(tmp_path / "disk") <= MIB
        files.size_bytes = MIB + 300 * KIB
        for i in range(10):
            assert tier.write([block((i, "more"))]) == [WriteStatus.STORED]
        assert used_bytes(tmp_path / "disk") <= 300 * KIB
        files.size_bytes = MIB
        assert "no room" not in caplog.text
        statuses = [tier.write([block((i, "none"))])[0] for i in range(10)]
        assert statuses[-1] is WriteStatus.FULL
        assert "left to others" in caplog.text

    def test_whoever_has_most_gives_first(self, open_disk: Open) -> None:
        tier = open_disk(MIB, segment_bytes=64 * KIB)
        small = [(make_key(i, tenant=BLUE), make_payload(i, NBYTES)) for i in range(3)]
        tier.write(small)
        for i in range(300):
            assert tier.write([block(i)]) == [WriteStatus.STORED]
        assert tier.lookup([key for key, _ in small]) == [Status.HIT] * 3
        assert tier.usage_of(BLUE).num_blocks == 3
        assert tier.usage_of(TENANT).num_blocks == tier.usage().num_blocks - 3

    def test_what_was_read_is_kept_and_what_was_looked_up_is_not(self, open_disk: Open) -> None:
        metrics = Metrics()
        tier = open_disk(MIB, segment_bytes=128 * KIB, metrics=metrics)
        tier.write([block("read"), block("looked up")])
        for i in range(400):
            if i % 20 == 0:
                assert load(tier, "read") == block("read")[1], i
                tier.lookup([make_key("looked up")])
            tier.write([block(i)])
        assert loaded(tier, ["read", "looked up"]) == [True, False]
        assert 1 < tier.write_amplification() <= 1.3
        moved, new = (value(metrics, "kvtier_disk_record_bytes_total", why=why) for why in ("moved", "new"))
        assert 1 + moved / new == pytest.approx(tier.write_amplification())

    def test_moving_has_a_bound(self, open_disk: Open) -> None:
        tier = open_disk(MIB, segment_bytes=64 * KIB, write_amplification=1.1)
        for i in range(400):
            tier.write([block(i)])
            loaded(tier, range(max(0, i - 40), i + 1))
        assert 1.05 < tier.write_amplification() <= 1.1

    def test_a_skewed_load_hits_about_as_often_as_with_an_lru(self, open_disk: Open) -> None:
        tier = open_disk(8 * MIB, segment_bytes=256 * KIB)
        order, nbytes = random.Random(1), 4096
        capacity = 8 * MIB // 4096 * 9 // 10
        labels = order.choices(range(3 * capacity), [1 / (i + 1) ** 0.9 for i in range(3 * capacity)], k=12_000)
        lru: dict[int, None] = {}
        hits = lru_hits = 0
        for start in range(0, len(labels), 16):
            batch = labels[start : start + 16]
            found = read_blocks(tier, [make_key(i) for i in batch], nbytes)
            hits += sum(block is not None for block in found)
            missing = [i for i, block in zip(batch, found, strict=True) if block is None]
            tier.write([(make_key(i), make_payload(i, nbytes)) for i in missing])
            for i in batch:
                lru_hits += i in lru
                lru.pop(i, None)
                lru[i] = None
                if len(lru) > capacity:
                    del lru[next(iter(lru))]
        print(f"log {hits / len(labels):.3f}, LRU {lru_hits / len(labels):.3f}, {tier.write_amplification():.2f}")
        assert hits >= lru_hits - 0.03 * len(labels)


def test_events_follow_the_changes(open_disk: Open) -> None:
    events: list[Event] = []
    tier = open_disk(on_event=events.append)
    a, b, c = (make_key(label) for label in "abc")
    tier.write([block("a"), block("b")])
    tier.write([block("c")])
    tier.discard([a, make_key("absent")])
    assert events == [
        Event(EventKind.STORED, "disk", (a, b)),
        Event(EventKind.STORED, "disk", (c,)),
        Event(EventKind.REMOVED, "disk", (a,)),
    ]
    events.clear()
    open_disk(on_event=events.append)
    assert [(event.kind, set(event.keys)) for event in events] == [(EventKind.STORED, {b, c})]


def test_events_tell_what_is_there_whatever_is_evicted_and_moved(open_disk: Open) -> None:
    there: set[StoreKey] = set()

    def note(event: Event) -> None:
        (there.update if event.kind is EventKind.STORED else there.difference_update)(event.keys)

    tier = open_disk(MIB, segment_bytes=64 * KIB, on_event=note)
    for i in range(200):
        tier.write([block(i)])
        loaded(tier, range(max(0, i - 30), i, 3))
    assert there == {make_key(i) for i in range(200) if tier.lookup([make_key(i)]) == [Status.HIT]}
    there.clear()
    tier = open_disk(MIB // 2, on_event=note)
    assert there == {make_key(i) for i in range(200) if tier.lookup([make_key(i)]) == [Status.HIT]}
    assert 0 < len(there) < MIB // 2 // NBYTES


class TestFailingWrites:
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
        monkeypatch.setattr(trouble, "_PAUSE_S", 0.01)
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
        tier._trouble.wrote()  # one that was under way
        assert tier.state is TierState.OFF

    @pytest.mark.parametrize("direct", [False, True])
    @pytest.mark.parametrize("what", ["FIFO", "link", "folder"])
    def test_something_else_in_the_place_of_a_segment_holds_nobody_up(
        self, tmp_path: Path, open_disk: Open, what: str, direct: bool
    ) -> None:
        tier = open_disk(files=OsFiles(direct=direct and supports_direct(str(tmp_path))))
        tier.write([block("a")])
        tier._files.descriptors.forget(1)  # as if others had been used since
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
    tier._files.descriptors.forget(1)  # as if others had been used since
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


def test_a_payload_that_cannot_be_copied_gives_its_claim_back(open_disk: Open) -> None:
    tier = open_disk()
    strided = memoryview(bytes(2 * NBYTES))[::2]
    with pytest.raises(BufferError):
        tier.write([block("a"), (make_key("b"), strided)])
    assert tier.lookup([make_key("a"), make_key("b")]) == [Status.HIT, Status.MISS]
    tier.check()


class Halting(OsFiles):
    """Stops one operation on payloads in the middle until the test goes on."""

    def __init__(self, op: str) -> None:
        super().__init__(direct=False)
        self._op = op
        self.reached = threading.Event()
        self.go_on = threading.Event()

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        if offset:
            self._halt("write")
        super().write(fd, buffers, offset)

    def remove(self, path: str) -> None:
        self._halt("remove")
        super().remove(path)

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._halt("read")
        return super().read(fd, buffers, offset)

    def _halt(self, op: str) -> None:
        if op == self._op and not self.reached.is_set():
            self.reached.set()
            assert self.go_on.wait(20)


class TestThreads:
    def test_a_block_being_written_is_pending_and_can_be_discarded(self, tmp_path: Path, open_disk: Open) -> None:
        files = Halting("write")
        tier = open_disk(files=files)
        with ThreadPoolExecutor(1) as executor:
            writing = executor.submit(tier.write, [block("a"), block("other")])
            assert files.reached.wait(20)
            assert tier.lookup([make_key("a")]) == [Status.PENDING]
            assert load(tier, "a") is None
            assert tier.write([block("a")]) == [WriteStatus.EXISTS]
            assert tier.discard([make_key("a")]) == 0
            assert tier.lookup([make_key("a")]) == [Status.MISS]
            assert tier.write([block("a")]) == [WriteStatus.STORED]
            files.go_on.set()
            assert writing.result(20) == [WriteStatus.STORED] * 2
        assert loaded(tier, ["a", "other"]) == [True, True]
        assert tier.usage().num_blocks == 2
        tier = open_disk()
        assert loaded(tier, ["a", "other"]) == [True, True]

    def test_what_was_discarded_while_it_was_written_stays_gone(self, open_disk: Open) -> None:
        files = Halting("write")
        tier = open_disk(files=files)
        with ThreadPoolExecutor(1) as executor:
            writing = executor.submit(tier.write, [block("a"), block("other")])
            assert files.reached.wait(20)
            tier.discard([make_key("a")])
            files.go_on.set()
            writing.result(20)
        assert loaded(tier, ["a", "other"]) == [False, True]
        assert loaded(open_disk(), ["a", "other"]) == [False, True]

    def test_a_block_discarded_while_it_is_read_is_right_or_a_miss(self, open_disk: Open) -> None:
        metrics = Metrics()
        files = Halting("read")
        tier = open_disk(files=files, metrics=metrics)
        tier.write([block("a")])
        with ThreadPoolExecutor(1) as executor:
            reading = executor.submit(load, tier, "a")
            assert files.reached.wait(20)
            tier.discard([make_key("a")])
            assert tier.usage().used_bytes == 0, "the file is gone although somebody reads it"
            files.go_on.set()
            assert reading.result(20) is None
        assert value(metrics, "kvtier_corrupt_blocks_total") == 0
        assert value(metrics, "kvtier_io_errors_total", op="read", error="ENOENT") == 0

    def test_a_block_moved_while_it_is_read_is_found_where_it_is_then(self, open_disk: Open) -> None:
        files = Halting("read")
        tier = open_disk(MIB, segment_bytes=64 * KIB, files=files)
        files.reached.set()  # not the reads that follow
        for i in range(60):
            tier.write([block(i)])
        labels = [i for i in range(60) if tier.lookup([make_key(i)]) == [Status.HIT]]
        kept = labels[0]
        for _ in range(3):
            assert load(tier, kept) == block(kept)[1]
        files.reached.clear()
        with ThreadPoolExecutor(1) as executor:
            reading = executor.submit(load, tier, kept)
            assert files.reached.wait(20)
            before = tier.write_amplification()
            for i in range(100, 140):
                tier.write([block(i)])
            assert tier.write_amplification() > before
            assert tier.lookup([make_key(kept)]) == [Status.HIT]
            files.go_on.set()
            assert reading.result(20) == block(kept)[1]

    def test_close_waits_for_calls_in_flight(self, tmp_path: Path) -> None:
        files = Halting("write")
        tier = DiskTier.open(tmp_path / "disk", MIB, reserve_bytes=0, files=files)
        with ThreadPoolExecutor(2) as executor:
            writing = executor.submit(tier.write, [block("a")])
            assert files.reached.wait(20)
            closing = executor.submit(tier.close)
            assert not closing.done()
            files.go_on.set()
            closing.result(20)
            assert writing.result(20) == [WriteStatus.STORED]

    def test_readers_writers_and_discarders_of_several_tenants(self, open_disk: Open) -> None:
        """Under eviction all the while: what is read is right, and what was discarded is found by nobody afterwards."""
        tier = open_disk(MIB, segment_bytes=64 * KIB)
        tenants = [tenant_id(name) for name in ("red", "blue", "green")]

        def work(worker: int) -> None:
            order = random.Random(worker)
            tenant = tenants[worker % 3]
            for _ in range(60):
                batch = [order.randrange(80) for _ in range(5)]
                keys = [make_key(i, tenant=tenant) for i in batch]
                payloads = [make_payload((tenant, i), NBYTES) for i in batch]
                tier.write(list(zip(keys, payloads, strict=True)))
                found = read_blocks(tier, keys, NBYTES)
                assert all(block in (None, payload) for block, payload in zip(found, payloads, strict=True))
                if order.random() < 0.2:
                    tier.discard(keys[:2])
                if order.random() < 0.02:
                    tier.purge(tenant)

        with ThreadPoolExecutor(6) as executor:
            for future in [executor.submit(work, worker) for worker in range(6)]:
                future.result(60)
        tier.check()
        everything = [make_key(i, tenant=tenant) for tenant in tenants for i in range(80)]
        before = tier.lookup(everything)
        tier = open_disk(MIB, segment_bytes=64 * KIB)
        assert tier.lookup(everything) == before


def test_nothing_is_left_open_after_close(tmp_path: Path) -> None:
    def descriptors() -> set[str]:
        return {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)}

    def _is_open(fd: str) -> bool:
        return os.path.lexists(f"/proc/self/fd/{fd}")

    for sync in SyncPolicy:
        tier = DiskTier.open(tmp_path / "disk", MIB, reserve_bytes=0, sync=sync)
        tier.write([block((sync, i)) for i in range(40)])
        tier.close()
    assert not [path for path in descriptors() if path.startswith(str(tmp_path))]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvtier-disk")]


class TestFolder:
    def test_with_other_content_is_refused_and_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.tex").write_text("years of work")
        with pytest.raises(ConfigError, match=r"thesis\.tex.*empty or new folder") as caught:
            DiskTier.open(tmp_path, MIB)
        assert str(tmp_path) in str(caught.value)
        assert os.listdir(tmp_path) == ["thesis.tex"]

    @pytest.mark.parametrize(("number", "words"), [(1, "a file per block.*empty the folder"), (3, "another version")])
    def test_of_another_version_is_refused(self, tmp_path: Path, number: int, words: str) -> None:
        (tmp_path / MARKER).write_text(f"kvtier disk tier, format {number}\n")
        with pytest.raises(ConfigError, match=words):
            DiskTier.open(tmp_path, MIB)

    def test_that_cannot_be_made_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigError, match="file/disk cannot be used"):
            DiskTier.open(tmp_path / "file" / "disk", MIB)

    def test_serves_one_owner(self, tmp_path: Path) -> None:
        """Another process is refused likewise: `test_disk_crash.py`."""
        tier = DiskTier.open(tmp_path / "disk", MIB)
        with pytest.raises(ConfigError, match="in use by another process") as caught:
            DiskTier.open(tmp_path / "disk", MIB)
        assert str(tmp_path / "disk") in str(caught.value)
        tier.close()
        DiskTier.open(tmp_path / "disk", MIB).close()

    def test_is_free_after_a_refused_start(self, tmp_path: Path) -> None:
        class Broken(OsFiles):
            def open(self, path: str, *, writable: bool = True) -> int:
                raise OSError(errno.EACCES, "not yours", path)

        tier = DiskTier.open(tmp_path, MIB, reserve_bytes=0)
        tier.write([block(i) for i in range(40)])
        tier.close()
        broken: FileLayer = Broken(direct=False)
        with pytest.raises(ConfigError, match="cannot be read or written"):
            DiskTier.open(tmp_path, 100 * KIB, files=broken)
        tier = DiskTier.open(tmp_path, MIB, reserve_bytes=0)
        assert tier.usage().num_blocks > 0
        tier.close()

    def test_and_its_files_are_the_users_alone(self, tmp_path: Path, open_disk: Open) -> None:
        open_disk().write([block("a")])
        assert (tmp_path / "disk").stat().st_mode & 0o777 == 0o700
        assert [path.stat().st_mode & 0o777 for path in (tmp_path / "disk").iterdir()] == [0o600] * 2


@pytest.mark.parametrize(
    ("capacity_bytes", "options"),
    [(0, {}), (MIB, {"num_threads": 0}), (MIB, {"segment_bytes": 4096}), (MIB, {"write_amplification": 0.9})],
)
def test_sizes_that_hold_nothing_are_refused(tmp_path: Path, capacity_bytes: int, options: dict[str, float]) -> None:
    with pytest.raises(InvalidInputError):
        DiskTier.open(tmp_path, capacity_bytes, **options)
