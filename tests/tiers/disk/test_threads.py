"""Threads at one disk tier: a block that one writes, reads or moves while another wants it, or wants it gone."""

import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from disk_forgetting_rig import SMALL, WAIT_S, items
from disk_rig import opened
from disk_tier_rig import KIB, MIB, NBYTES, Open, block, load, loaded, reopening, value
from kvtier.identity.keys import StoreKey, tenant_id
from kvtier.metrics import Metrics
from kvtier.testing.blocks import summed
from kvtier.testing.contract import make_key, make_payload, read_blocks
from kvtier.tiers.base import Item, Status, WriteStatus
from kvtier.tiers.disk.medium.files import OsFiles
from kvtier.tiers.disk.tier import DiskTier


@pytest.fixture
def open_disk(tmp_path: Path) -> Iterator[Open]:
    with reopening(tmp_path / "disk") as open_one:
        yield open_one


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


def test_a_block_being_written_is_pending_and_can_be_discarded(tmp_path: Path, open_disk: Open) -> None:
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


def test_what_was_discarded_while_it_was_written_stays_gone(open_disk: Open) -> None:
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


def test_a_block_discarded_while_it_is_read_is_right_or_a_miss(open_disk: Open) -> None:
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


def test_a_block_moved_while_it_is_read_is_found_where_it_is_then(open_disk: Open) -> None:
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


def test_close_waits_for_calls_in_flight(tmp_path: Path) -> None:
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


def test_readers_writers_and_discarders_of_several_tenants(open_disk: Open) -> None:
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
            tier.write([summed(*block) for block in zip(keys, payloads, strict=True)])
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


def apart(number: int) -> tuple[list[Item[bytes]], list[StoreKey]]:
    """Blocks each of which is written by itself, and every other of them: those are read by themselves."""
    blocks = items(range(number), 256 * KIB)
    return blocks, [key for key, _, _ in blocks[::2]]


class TestTwoThreads:
    """A tier may have two reads and two writes under way at once."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return tmp_path / "disk"

    def open(self, folder: Path, files: OsFiles) -> AbstractContextManager[DiskTier]:
        return opened(folder, 64 * MIB, segment_bytes=MIB, files=files, num_threads=2)

    def test_have_no_more_on_their_way(self, folder: Path) -> None:
        class Crowded(OsFiles):
            lock = threading.Lock()
            pair, crowd = threading.Event(), threading.Event()
            num, most = 0, 0

            @contextmanager
            def on_the_way(self, buffers: Sequence[memoryview]) -> Iterator[None]:
                if sum(map(len, buffers)) < 256 * KIB:
                    yield
                    return
                with self.lock:
                    self.num += 1
                    self.most = max(self.most, self.num)
                    if self.num == 2:
                        self.pair.set()
                    if self.num > 2:
                        self.crowd.set()
                self.pair.wait(WAIT_S)
                self.crowd.wait(0.01)  # for others that are not to come
                yield
                with self.lock:
                    self.num -= 1

            def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
                with self.on_the_way(buffers):
                    super().write(fd, buffers, offset)

            def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
                with self.on_the_way(buffers):
                    return super().read(fd, buffers, offset)

        files = Crowded(direct=False)
        blocks, keys = apart(12)
        with self.open(folder, files) as tier:
            assert tier.write(blocks) == [WriteStatus.STORED] * 12
            assert files.most == 2
            files.most = 0
            files.pair.clear()
            assert None not in read_blocks(tier, keys, 256 * KIB)
            assert files.most == 2


@pytest.mark.parametrize("num_threads", [0, 1])
def test_a_process_that_may_have_no_more_threads_works_with_fewer(
    open_disk: Open, monkeypatch: pytest.MonkeyPatch, num_threads: int
) -> None:
    left = {"kvtier-disk": num_threads, "kvtier-disk-write": num_threads}
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        pool = thread.name.partition("_")[0]
        if left.get(pool, 0) < 1:
            raise RuntimeError("can't start new thread")
        left[pool] -= 1
        start(thread)

    tier = open_disk()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for label in range(8):
            assert tier.write([block(label)]) == [WriteStatus.STORED]
        assert loaded(tier, range(8)) == [True] * 8
        assert tier.discard([make_key(0)]) == 1
    assert loaded(tier, range(8)) == [False] + [True] * 7
    assert loaded(open_disk(), range(8)) == [False] + [True] * 7
