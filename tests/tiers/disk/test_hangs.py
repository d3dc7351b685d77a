"""A medium that hangs: the tier is off meanwhile, holds nobody up, and is back by itself."""

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from disk_rig import opened
from disk_tier_rig import MIB
from hanging_disk import hanging_disk
from kvtier.events import Event, EventKind, TierState
from kvtier.metrics import Metrics
from kvtier.testing.blocks import make_key, make_payload, summed
from kvtier.tiers.base import Status, WriteStatus
from kvtier.tiers.common.lent_memory import LentMemory
from kvtier.tiers.disk.medium.files import OsFiles
from kvtier.tiers.disk.medium.watch import HangWatch
from kvtier.tiers.disk.tier import DiskTier

SIZE = 64 << 10
TIMEOUT_S = 0.3
WAIT_S = 20.0


class Stuck(OsFiles):
    """Files whose operations stay for as long as the test wants."""

    def __init__(self) -> None:
        super().__init__(direct=False)
        self.stays: dict[str, threading.Event] = {}
        """The operations that stay, and what lets them go on."""
        self.num_inside = 0
        """Operations that are under way. Guarded by _lock."""
        self._lock = threading.Lock()

    def stay(self, *ops: str) -> threading.Event:
        """These operations do not end before the event is set."""
        go_on = threading.Event()
        self.stays |= dict.fromkeys(ops, go_on)
        return go_on

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        with self._stay("read"):
            return super().read(fd, buffers, offset)

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        with self._stay("write"):
            super().write(fd, buffers, offset)

    def create(self, path: str, nbytes: int) -> int:
        with self._stay("create"):
            return super().create(path, nbytes)

    def remove(self, path: str) -> None:
        with self._stay("remove"):
            super().remove(path)

    @contextlib.contextmanager
    def _stay(self, op: str) -> Iterator[None]:
        with self._lock:
            self.num_inside += 1
        try:
            if op in self.stays:
                assert self.stays[op].wait(WAIT_S)
            yield
        finally:
            with self._lock:
                self.num_inside -= 1


def items(*labels: int) -> list[tuple]:
    return [summed(make_key(label), make_payload(label, SIZE)) for label in labels]


def buffers(number: int) -> list[memoryview]:
    return [memoryview(bytearray(SIZE)) for _ in range(number)]


def until(tier: DiskTier, state: TierState) -> None:
    deadline = time.monotonic() + WAIT_S
    while tier.state is not state:
        assert time.monotonic() < deadline, f"is not {state}"
        time.sleep(0.002)


KEYS = [make_key(label) for label in range(4)]


def test_a_read_that_hangs_is_a_miss_and_leaves_lent_memory_alone_once_it_is_given_back(tmp_path: Path) -> None:
    files, metrics, events = Stuck(), Metrics(), list[Event]()
    with opened(tmp_path / "d", files=files, timeout_s=TIMEOUT_S, metrics=metrics, on_event=events.append) as tier:
        tier.write(items(*range(4)))
        go_on, into, back = files.stay("read"), buffers(4), threading.Event()
        lent = LentMemory()
        assert tier.read(KEYS, into, lent) == [Status.MISS] * 4

        def give_back() -> None:
            for buffer in into:
                buffer[:] = bytes(SIZE)
            back.set()

        lent.when_done(give_back)
        assert tier.state is TierState.OFF
        assert "read" in str(tier.problem())
        assert tier.lookup(KEYS) == tier.read(KEYS, buffers(4)) == [Status.MISS] * 4
        assert tier.write(items(9)) == [WriteStatus.FAILED]
        states = metrics.registry.get_sample_value
        assert states("kvtier_tier_state", {"tier": "disk", "state": "off"}) == 1
        assert states("kvtier_tier_degraded_total", {"tier": "disk", "state": "off"}) == 1
        assert not back.is_set()
        go_on.set()
        until(tier, TierState.WRITABLE)
        assert tier.problem() is None
        assert back.wait(WAIT_S)
        assert not any(any(bytes(buffer)) for buffer in into)
        assert tier.read(KEYS, into) == [Status.HIT] * 4
        assert tier.write(items(9)) == [WriteStatus.STORED]
    kinds = [event.kind for event in events]
    assert kinds.count(EventKind.OFF) == kinds.count(EventKind.WRITABLE) == 1
    assert EventKind.CLEARED not in kinds


def test_lent_memory_is_given_back_when_the_medium_answers(tmp_path: Path) -> None:
    files, back = Stuck(), threading.Event()
    with opened(tmp_path / "d", files=files, timeout_s=TIMEOUT_S) as tier:
        tier.write(items(0))
        lent, into = LentMemory(), buffers(1)
        assert tier.read(KEYS[:1], into, lent) == [Status.HIT]
        lent.when_done(back.set)
        assert back.is_set()
        back.clear()
        lent, go_on = LentMemory(), files.stay("read")
        assert tier.read(KEYS[:1], into, lent) == [Status.MISS]
        lent.when_done(back.set)
        assert not back.is_set()
        go_on.set()
        assert back.wait(WAIT_S)


@pytest.mark.parametrize("op", ["read", "write"])
def test_a_call_without_lent_memory_ends_when_the_medium_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    files, into, waits, wait = Stuck(), buffers(4), threading.Event(), LentMemory.wait

    def told_wait(lent: LentMemory) -> None:
        waits.set()
        wait(lent)

    with opened(tmp_path / "d", files=files, timeout_s=TIMEOUT_S) as tier, ThreadPoolExecutor(1) as caller:
        tier.write(items(*range(4)))
        go_on = files.stay(op)

        def call() -> tuple[list, int]:
            statuses = tier.read(KEYS, into) if op == "read" else tier.write(items(*range(10, 14)))
            return statuses, files.num_inside

        monkeypatch.setattr(LentMemory, "wait", told_wait)
        begun_before = caller.submit(call)
        assert waits.wait(WAIT_S)
        assert tier.state is TierState.OFF
        assert tier.read(KEYS, buffers(4)) == [Status.MISS] * 4
        assert tier.write(items(9)) == [WriteStatus.FAILED]
        assert not begun_before.done()
        go_on.set()
        statuses, num_inside = begun_before.result(WAIT_S)
        assert statuses == [Status.MISS if op == "read" else WriteStatus.FAILED] * 4
        assert not num_inside
        until(tier, TierState.WRITABLE)
        assert tier.read(KEYS, into) == [Status.HIT] * 4


def test_a_close_does_not_wait_for_a_call_that_waits_for_the_medium(tmp_path: Path) -> None:
    files = Stuck()
    tier = DiskTier.open(tmp_path / "d", 4 * MIB, reserve_bytes=0, files=files, timeout_s=TIMEOUT_S)
    tier.write(items(*range(4)))
    go_on = files.stay("read")
    with ThreadPoolExecutor(1) as caller:
        call = caller.submit(tier.read, KEYS, buffers(4))
        until(tier, TierState.OFF)
        tier.close()
        assert not call.done()
        closing = [thread for thread in threading.enumerate() if thread.name.startswith("kvtier-disk")]
        go_on.set()
        assert call.result(WAIT_S) == [Status.MISS] * 4
    for left in closing:
        left.join(WAIT_S)
    with opened(tmp_path / "d") as tier:
        assert tier.lookup(KEYS) == [Status.HIT] * 4


def test_a_write_that_hangs_has_failed_and_leaves_lent_memory_alone_once_it_is_given_back(tmp_path: Path) -> None:
    files = Stuck()
    with opened(tmp_path / "d", files=files, timeout_s=TIMEOUT_S, num_threads=1, segment_bytes=SIZE) as tier:
        go_on = files.stay("write", "create")
        key, payload, checksum = summed(make_key(1), make_payload(1, SIZE))
        memory, lent, back = bytearray(payload), LentMemory(), threading.Event()
        assert tier.write([(key, memory, checksum), *items(2, 3)], lent) == [WriteStatus.FAILED] * 3

        def give_back() -> None:
            memory[:] = bytes(SIZE)  # another block's by now
            back.set()

        lent.when_done(give_back)
        assert not back.is_set()
        go_on.set()
        assert back.wait(WAIT_S)
        until(tier, TierState.WRITABLE)
        keys = [make_key(n) for n in (1, 2, 3)]
        deadline = time.monotonic() + WAIT_S
        while tier.lookup(keys) != [Status.HIT] * 3:  # until what hung has let go of its keys
            assert time.monotonic() < deadline
            tier.write(items(1, 2, 3))
        assert tier.read(keys, (into := buffers(3))) == [Status.HIT] * 3
        assert [bytes(buffer) for buffer in into] == [make_payload(n, SIZE) for n in (1, 2, 3)]


@pytest.mark.parametrize("op", ["create", "write", "remove"])
def test_a_discard_during_a_hang_holds_after_it(tmp_path: Path, op: str) -> None:
    files = Stuck()
    with opened(tmp_path / "d", files=files, timeout_s=TIMEOUT_S) as tier:
        tier.write(items(*range(4)))
        go_on = files.stay(op)
        assert tier.discard(KEYS) == 4
        assert tier.discard(KEYS) == 0
        go_on.set()
        until(tier, TierState.WRITABLE)
    with opened(tmp_path / "d") as tier:
        assert tier.lookup(KEYS) == [Status.MISS] * 4


def test_what_waits_to_be_forgotten_stays_little_however_often_it_is_discarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.tiers.disk.operations.tombstones._MOST_WAITING", 10)
    files = Stuck()
    with opened(tmp_path / "d", files=files, timeout_s=TIMEOUT_S) as tier:
        tier.write(items(*range(4)))
        go_on = files.stay("write", "create")
        assert tier.discard(KEYS[:1]) == 1
        for _ in range(100):
            assert tier.discard(KEYS[:1]) == 0
        assert tier._parts.threads[2]._waiting.qsize() <= 10
        assert tier.discard(KEYS) == 3
        go_on.set()
        until(tier, TierState.WRITABLE)
    with opened(tmp_path / "d") as tier:
        assert tier.lookup(KEYS) == [Status.MISS] * 4


def test_threads_stay_few_however_many_call(tmp_path: Path) -> None:
    files = Stuck()
    with opened(tmp_path / "d", files=files, timeout_s=TIMEOUT_S, num_threads=2) as tier:
        tier.write(items(*range(4)))
        go_on = files.stay("read", "write", "create")
        callers = [threading.Thread(target=tier.read, args=(KEYS, buffers(4), LentMemory())) for _ in range(20)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(WAIT_S)
            assert not caller.is_alive()
        for label in range(50, 70):
            tier.write(items(label))
            tier.discard(KEYS[:1])
        assert sum(thread.name.startswith("kvtier-disk") for thread in threading.enumerate()) <= 3 * 2 + 1
        go_on.set()
        until(tier, TierState.WRITABLE)


def test_a_tier_that_hangs_is_closed_in_time(tmp_path: Path) -> None:
    files = Stuck()
    tier = DiskTier.open(tmp_path / "d", 4 * MIB, reserve_bytes=0, files=files, timeout_s=TIMEOUT_S)
    tier.write(items(*range(4)))
    go_on = files.stay("write")
    tier.close()
    closing = [thread for thread in threading.enumerate() if thread.name.startswith("kvtier-disk")]
    assert closing
    assert all(thread.daemon for thread in closing)
    go_on.set()
    for thread in closing:
        thread.join(WAIT_S)
    with opened(tmp_path / "d") as tier:
        assert tier.lookup(KEYS) == [Status.HIT] * 4


def test_a_hang_is_told_once_and_ends_with_the_operation_that_hung() -> None:
    now, told = 0.0, list[str | None]()
    watch = HangWatch(5.0, told.append, lambda: now)
    with watch.operation("read"):
        now = 4.0
        assert not watch.hangs()
        with watch.operation("write"):
            now = 6.0
            assert watch.hangs()
            assert watch.hangs()
        assert watch.hangs()
    assert not watch.hangs()
    assert len(told) == 2
    assert "read" in str(told[0])
    assert told[1] is None


def test_a_hang_lasts_until_all_have_ended_that_were_under_way_when_it_was_noticed() -> None:
    """A medium that gives up one operation after the other does not answer again in between."""
    now, told = 0.0, list[str | None]()
    watch = HangWatch(5.0, told.append, lambda: now)
    with contextlib.ExitStack() as later:
        with watch.operation("read"):
            now = 4.0
            later.enter_context(watch.operation("write"))
            now = 6.0
            assert watch.hangs()
        assert watch.hangs()
        with watch.operation("read"):
            later.close()
            assert not watch.hangs()
    assert len(told) == 2


def test_a_file_system_that_hangs_and_answers_again(tmp_path: Path) -> None:
    with hanging_disk(tmp_path) as disk, opened(disk.folder / "tier", 16 * MIB, timeout_s=TIMEOUT_S) as tier:
        tier.write(items(*range(4)))
        assert tier.read(KEYS, buffers(4)) == [Status.HIT] * 4
        disk.hang()
        assert tier.read(KEYS, buffers(4), LentMemory()) == [Status.MISS] * 4
        assert tier.state is TierState.OFF
        assert tier.write(items(7)) == [WriteStatus.FAILED]
        assert tier.discard(KEYS[:1]) == 1
        disk.answer()
        until(tier, TierState.WRITABLE)
        assert tier.read(KEYS, buffers(4)) == [Status.MISS] + [Status.HIT] * 3
