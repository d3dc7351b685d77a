"""The store: memory over disk, without a transport."""

import errno
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from disk_rig import damage
from gated_files import GatedFiles
from kvtier.codec.stored_form import decode, encode_header, parse_header
from kvtier.errors import LimitExceededError, UnavailableError
from kvtier.events import EventKind
from kvtier.testing.contract import make_key, make_payload
from kvtier.testing.faults import FaultyFiles
from kvtier.tiers.base import Status, WriteStatus
from kvtier.tiers.disk.medium.files import OsFiles
from kvtier.tiers.host.pins import ReadPin
from kvtier.tiers.host.slots import WriteSlot
from kvtier.tiers.host.tier import HostTier
from pool_rig import BLOCK_BYTES, BLUE, MIB, RED, WAIT_S, CoreRig, core_rig, until

KEY = make_key("a")
PAYLOAD = make_payload("a", BLOCK_BYTES)


def keys(count: int) -> list[bytes]:
    return [make_key(i) for i in range(count)]


def test_an_acknowledged_block_is_readable_at_once_and_verifiable() -> None:
    with core_rig() as rig:
        assert rig.core.lookup([KEY]) == [Status.MISS]
        assert rig.store("a") is WriteStatus.STORED
        assert rig.core.lookup([KEY]) == [Status.HIT]
        with rig.core.read([KEY, make_key("b"), KEY], BLOCK_BYTES) as (block, missing, again):
            assert block is not None
            assert again is not None
            assert missing is None
            decode(block.header, KEY, block.payload)
            assert bytes(again.payload) == PAYLOAD
        assert rig.store("a") is WriteStatus.EXISTS
        assert rig.load([KEY], BLOCK_BYTES - 1) == [None]


def test_a_block_under_another_tenants_name_is_refused() -> None:
    with core_rig() as rig:
        header = parse_header(encode_header(make_key("a", tenant=BLUE), PAYLOAD))
        assert rig.core.begin_write(RED, header.key, header.stored_length) is WriteStatus.FAILED
        assert rig.core.lookup([make_key("a", tenant=BLUE), KEY]) == [Status.MISS] * 2


def test_a_block_whose_checksum_does_not_hold_is_never_seen() -> None:
    with core_rig() as rig:
        header = parse_header(encode_header(KEY, PAYLOAD))
        slot = rig.core.begin_write(RED, header.key, header.stored_length)
        assert isinstance(slot, WriteSlot)
        slot.view[:] = PAYLOAD[:-1] + bytes((PAYLOAD[-1] ^ 1,))
        assert rig.core.lookup([KEY]) == [Status.PENDING]
        assert rig.core.commit_write(slot, header) is WriteStatus.FAILED
        assert rig.core.lookup([KEY]) == [Status.MISS]
        assert rig.store("a") is WriteStatus.STORED


def test_blocks_survive_a_restart_on_disk_and_are_promoted_to_memory(tmp_path: Path) -> None:
    with core_rig(tmp_path) as rig:
        for i in range(20):
            assert rig.store(i) is WriteStatus.STORED
        (report,) = rig.core.drain(WAIT_S)
        assert report.num_abandoned == report.num_memory_only == 0
        assert rig.count("kvtier_pool_written_down_blocks_total", tier="disk", result="stored") == 20
    with core_rig(tmp_path) as rig:
        assert rig.core.lookup(keys(21)) == [Status.HIT] * 20 + [Status.MISS]
        for source in ("disk", "memory"):
            assert rig.load(keys(20)) == [make_payload(i, BLOCK_BYTES) for i in range(20)]
            assert rig.count("kvtier_pool_read_blocks_total", source=source) == 20
        assert rig.files.read_bytes == 20 * BLOCK_BYTES


def test_what_a_drain_has_waited_for_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = HostTier.release

    def release_late(memory: HostTier, leases: Iterable[ReadPin | None]) -> None:
        given_back = list(leases)
        if given_back:  # by the thread that has written the block down: the drain may be over before it goes on
            time.sleep(0.3)
        release(memory, given_back)

    monkeypatch.setattr(HostTier, "release", release_late)
    with core_rig(tmp_path) as rig:
        assert rig.store("a") is WriteStatus.STORED
        (report,) = rig.core.drain(WAIT_S)
        assert report.num_memory_only == 0
        assert rig.count("kvtier_pool_written_down_blocks_total", tier="disk", result="stored") == 1


def test_a_writer_hears_throttled_while_too_much_waits_for_the_disk(tmp_path: Path) -> None:
    with core_rig(tmp_path, queue_bytes=4 * BLOCK_BYTES) as rig:
        rig.files.may_write.clear()
        assert [rig.store(i) for i in range(8)] == [WriteStatus.STORED] * 4 + [WriteStatus.THROTTLED] * 4
        assert rig.store(0) is WriteStatus.EXISTS
        assert rig.core.lookup(keys(8)) == [Status.HIT] * 4 + [Status.MISS] * 4
        rig.files.may_write.set()
        (report,) = rig.core.drain(WAIT_S)
        assert (report.num_abandoned, report.num_memory_only) == (0, 0)
        assert rig.load(keys(4)) == [make_payload(i, BLOCK_BYTES) for i in range(4)]


def test_a_writer_hears_full_when_all_memory_waits_for_the_disk(tmp_path: Path) -> None:
    with core_rig(tmp_path, memory_bytes=MIB, queue_bytes=4 * MIB) as rig:
        rig.files.may_write.clear()
        statuses = [rig.store(i) for i in range(20)]
        num_stored = statuses.count(WriteStatus.STORED)
        assert statuses == [WriteStatus.STORED] * num_stored + [WriteStatus.FULL] * (20 - num_stored)
        assert 0 < num_stored < 20
        assert rig.load(keys(num_stored)) == [make_payload(i, BLOCK_BYTES) for i in range(num_stored)]


def cold(tmp_path: Path, labels: list[object]) -> None:
    """Puts blocks on the disk that the next core finds."""
    with core_rig(tmp_path) as rig:
        for label in labels:
            assert rig.store(label) is WriteStatus.STORED
        rig.core.drain(WAIT_S)


def test_readers_of_one_cold_block_read_it_once(tmp_path: Path) -> None:
    cold(tmp_path, ["a", "b"])
    with core_rig(tmp_path) as rig, ThreadPoolExecutor(3) as executor:
        rig.files.may_read.clear()
        first = executor.submit(rig.load, [KEY])
        assert rig.files.reading.acquire(timeout=WAIT_S)
        others = [executor.submit(rig.load, [make_key("b"), KEY]) for _ in range(2)]
        assert rig.files.reading.acquire(timeout=WAIT_S)
        rig.files.may_read.set()
        assert first.result(WAIT_S) == [PAYLOAD]
        for other in others:
            assert other.result(WAIT_S) == [make_payload("b", BLOCK_BYTES), PAYLOAD]
        assert rig.files.read_bytes == 2 * BLOCK_BYTES


def test_a_length_that_the_disk_does_not_have_takes_no_memory(tmp_path: Path) -> None:
    """A client that names such a length would have others' blocks evicted for it."""
    with core_rig(tmp_path) as rig:
        rig.store("a")
        rig.core.drain(WAIT_S)
    with core_rig(tmp_path) as rig:
        for nbytes in (BLOCK_BYTES - 64, 4 * MIB):
            with rig.core.read([KEY], nbytes) as found:
                assert found == [None]
        assert rig.core._memory.taken_bytes() == 0
        assert rig.load([KEY]) == [PAYLOAD]


def test_a_cold_block_is_served_when_memory_has_no_slot_to_spare(tmp_path: Path) -> None:
    cold(tmp_path, ["a"])
    with core_rig(tmp_path, memory_bytes=MIB) as rig:
        rig.files.may_write.clear()
        assert WriteStatus.FULL in [rig.store(i) for i in range(20)]
        assert rig.load([KEY, KEY]) == [PAYLOAD] * 2
        assert rig.count("kvtier_pool_unadmitted_blocks_total", tier="disk") == 2
        assert rig.files.read_bytes == BLOCK_BYTES


def test_a_damaged_file_is_a_miss(tmp_path: Path) -> None:
    cold(tmp_path, ["a", "b"])
    damage(tmp_path, KEY)
    with core_rig(tmp_path) as rig:
        assert rig.load([KEY, make_key("b")]) == [None, make_payload("b", BLOCK_BYTES)]
        assert rig.core.lookup([KEY]) == [Status.MISS]
        assert rig.count("kvtier_corrupt_blocks_total", tier="disk") == 1


def test_a_discarded_block_does_not_come_back_from_the_queue(tmp_path: Path) -> None:
    with core_rig(tmp_path) as rig, ThreadPoolExecutor(1) as executor:
        rig.files.may_write.clear()
        rig.store("a")
        assert rig.files.writing.acquire(timeout=WAIT_S)  # being written
        for i in range(40):
            rig.store(i)  # in the queue
        discarding = executor.submit(rig.core.discard, [KEY, *keys(40), make_key("absent")])
        rig.files.may_write.set()
        assert discarding.result(WAIT_S) == 41
        assert rig.core.lookup([KEY, *keys(40)]) == [Status.MISS] * 41
        rig.core.drain(WAIT_S)
        assert rig.core.lookup([KEY, *keys(40)]) == [Status.MISS] * 41
    with core_rig(tmp_path) as rig:
        assert rig.core.lookup([KEY, *keys(40)]) == [Status.MISS] * 41


def test_a_block_discarded_while_it_is_read_from_disk_stays_gone(tmp_path: Path) -> None:
    cold(tmp_path, ["a"])
    with core_rig(tmp_path) as rig, ThreadPoolExecutor(1) as executor:
        rig.files.may_read.clear()
        reading = executor.submit(rig.load, [KEY])
        assert rig.files.reading.acquire(timeout=WAIT_S)
        assert rig.core.discard([KEY]) == 1
        assert rig.core.lookup([KEY]) == [Status.MISS]
        rig.files.may_read.set()
        assert reading.result(WAIT_S) in ([None], [PAYLOAD])
        assert rig.core.lookup([KEY]) == [Status.MISS]


def test_a_drain_that_has_no_time_counts_what_it_abandons(tmp_path: Path) -> None:
    with core_rig(tmp_path) as rig:
        rig.files.may_write.clear()
        for i in range(5):
            rig.store(i)
        (report,) = rig.core.drain(0.01)
        assert (report.num_written, report.num_abandoned) == (0, 5)
        assert rig.store("late") is WriteStatus.STORED
        assert [r.num_memory_only for r in rig.core.drain(0.0)] == [1]


def test_what_the_disk_refuses_is_counted_and_still_readable(tmp_path: Path) -> None:
    faulty = FaultyFiles(OsFiles(direct=False))
    with core_rig(tmp_path, files=GatedFiles(faulty)) as rig:
        for i, (code, result) in enumerate([(errno.ENOSPC, "full"), (errno.EIO, "failed")]):
            faulty.fail_next("create", code)
            assert rig.store(i) is WriteStatus.STORED
            counter = {"tier": "disk", "result": result}
            until(lambda c=counter: rig.count("kvtier_pool_written_down_blocks_total", **c) > 0)
        for i in range(2, 5):
            assert rig.store(i) is WriteStatus.STORED
        (report,) = rig.core.drain(WAIT_S)
        assert (report.num_memory_only, report.num_abandoned) == (0, 0), "what it did not take is tried again"
        assert rig.load(keys(5)) == [make_payload(i, BLOCK_BYTES) for i in range(5)]


def test_events_are_the_tenants_own(tmp_path: Path) -> None:
    with core_rig(tmp_path) as rig:
        subscription = rig.core.subscribe(RED)
        rig.store("a", tenant=BLUE)
        rig.store("a")
        rig.core.drain(WAIT_S)
        rig.core.discard([KEY, make_key("a", tenant=BLUE)])
        seen = []
        while len(seen) < 4:
            batch = subscription.wait()
            assert batch is not None
            assert batch.lost == 0
            seen += [(event.kind, event.tier, event.keys) for event in batch.events]
        assert sorted(seen, key=str) == sorted(
            [(kind, tier, (KEY,)) for kind in (EventKind.STORED, EventKind.REMOVED) for tier in ("memory", "disk")],
            key=str,
        )
        subscription.close()
        assert subscription.wait() is None


def test_a_slow_listener_hears_how_much_it_lost() -> None:
    with core_rig(event_buffer=3) as rig:
        subscription = rig.core.subscribe(RED)
        for i in range(10):
            rig.store(i)
        batch = subscription.wait()
        assert batch is not None
        assert batch.lost == 7
        assert [event.keys for event in batch.events] == [(make_key(i),) for i in (7, 8, 9)]


def test_event_streams_are_limited_and_end_with_the_pool() -> None:
    with core_rig(max_streams=2) as rig:
        one, two = rig.core.subscribe(RED), rig.core.subscribe(BLUE)
        with pytest.raises(LimitExceededError, match="max_event_streams"):
            rig.core.subscribe(RED)
        one.close()
        waiting = threading.Thread(target=two.wait)
        waiting.start()
        rig.core.end_event_streams()
        waiting.join(WAIT_S)
        assert not waiting.is_alive()
        with pytest.raises(UnavailableError):
            rig.core.subscribe(RED)


def test_usage_is_the_tenants_own(tmp_path: Path) -> None:
    with core_rig(tmp_path) as rig:
        for i in range(3):
            rig.store(i)
        for i in range(5):
            rig.store(i, tenant=BLUE)
        rig.core.drain(WAIT_S)
        memory, disk = rig.core.usage(RED)
        assert (memory.tier, memory.num_blocks, memory.used_bytes) == ("memory", 3, 3 * BLOCK_BYTES)
        assert (disk.tier, disk.num_blocks, disk.used_bytes >= 3 * BLOCK_BYTES) == ("disk", 3, True)
        assert [share.num_blocks for share in rig.core.usage(BLUE)] == [5, 5]
        rig.core.discard(keys(3))
        assert [(share.num_blocks, share.used_bytes) for share in rig.core.usage(RED)] == [(0, 0)] * 2


@pytest.mark.parametrize("nbytes", [1, BLOCK_BYTES])
def test_memory_that_is_full_is_said_to_be_full(nbytes: int) -> None:
    """However small its blocks are. What was discarded does not count."""
    with core_rig(memory_bytes=MIB) as rig:
        assert rig.core.usage(RED)[0].used_percent == 0
        num_stored = 0
        while rig.core.usage(RED)[0].num_blocks == num_stored:
            assert rig.store(num_stored, nbytes=nbytes) is WriteStatus.STORED
            num_stored += 1
        (memory,) = rig.core.usage(RED)
        assert memory.used_bytes == memory.num_blocks * nbytes
        assert 90 <= memory.used_percent <= 100
        assert rig.core.usage(BLUE)[0].used_percent == memory.used_percent, "of all tenants"
        rig.core.discard(keys(num_stored))
        assert rig.core.usage(RED)[0].used_percent < memory.used_percent // 2


def test_the_tail_of_a_request_is_evicted_before_its_head() -> None:
    with core_rig(memory_bytes=MIB) as rig:
        for i in range(8):
            rig.store(i)
        rig.core.touch(keys(8))
        label = 100
        while rig.core.lookup(keys(8)) == [Status.HIT] * 8:
            rig.store(label)
            label += 1
        assert rig.core.lookup(keys(8)) == [Status.HIT] * 7 + [Status.MISS]


def run_at_once(*calls: Callable[[], object]) -> None:
    start = threading.Barrier(len(calls))

    def run(call: Callable[[], object]) -> None:
        start.wait(WAIT_S)
        call()

    with ThreadPoolExecutor(len(calls)) as executor:
        for future in [executor.submit(run, call) for call in calls]:
            future.result(WAIT_S)


def test_readers_writers_and_discards_under_eviction_never_see_wrong_bytes(tmp_path: Path) -> None:
    with core_rig(tmp_path, memory_bytes=MIB, queue_bytes=MIB // 4) as rig:

        def work(rig: CoreRig, worker: int) -> None:
            for i in range(60):
                label = (i * 7 + worker * 13) % 40
                rig.store(label)
                assert rig.load([make_key(label)]) in ([None], [make_payload(label, BLOCK_BYTES)])
                if i % 10 == worker:
                    rig.core.discard([make_key(label)])

        run_at_once(*[lambda worker=worker: work(rig, worker) for worker in range(4)])
        rig.core.drain(WAIT_S)
        for i in range(100, 140):  # nothing is left pinned: memory takes new blocks
            assert rig.store(i) is WriteStatus.STORED
