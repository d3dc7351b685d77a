"""Bursts of several times the memory: what was acknowledged is readable, or was evicted with an event."""

import contextlib
import errno
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from gated_files import GatedFiles
from kvtier.codec.stored_form import encode_header, parse_header
from kvtier.events import Event, EventKind
from kvtier.identity.keys import StoreKey
from kvtier.protocol import pool_pb2
from kvtier.testing.contract import make_key, make_payload, read_blocks, summed
from kvtier.testing.faults import FaultyFiles
from kvtier.tiers.base import Status, Tier, WriteStatus
from kvtier.tiers.common.write_policy import WritePolicy
from kvtier.tiers.disk.medium.files import OsFiles
from kvtier.tiers.host.slots import WriteSlot
from kvtier.tiers.pool.tier import PoolTier
from kvtier_pool.limits import PoolLimits
from kvtier_pool.service import Addresses
from pool_rig import (
    BLOCK_BYTES,
    MIB,
    RED,
    TOKENS,
    WAIT_S,
    connect,
    core_rig,
    keys,
    payloads,
    running_pool,
    until,
)
from remote_tier import RemoteTier, remote_tier

MEMORY_BYTES = 8 * MIB
NUM_BLOCKS = 4 * MEMORY_BYTES // BLOCK_BYTES
DISK_BYTES = NUM_BLOCKS * BLOCK_BYTES * 3 // 2
"""Room for the whole burst: two of 16 segments are not full, heads take a page each."""
KEPT = (WriteStatus.STORED, WriteStatus.EXISTS)
REFUSED = (WriteStatus.FULL, WriteStatus.THROTTLED)
PATHS = ["shm", "block", "grpc"]

remote = pytest.fixture(remote_tier)


@contextlib.contextmanager
def burst_pool(**settings: Any) -> Iterator[Addresses]:
    """A pool that every path leads to."""
    with tempfile.TemporaryDirectory(prefix="kvtier-") as folder:
        listen = ("127.0.0.1:0", f"unix:{folder}/pool.sock")
        with running_pool(MEMORY_BYTES, listen=listen, **settings) as addresses:
            yield addresses


@contextlib.contextmanager
def clients(addresses: Addresses, path: str, count: int) -> Iterator[list[PoolTier]]:
    address = {"shm": addresses.block[1], "block": addresses.block[0], "grpc": f"grpc:{addresses.grpc[0]}"}[path]
    tiers = [connect(address, shared_memory=path == "shm") for _ in range(count)]
    try:
        yield tiers
    finally:
        for tier in tiers:
            tier.close()


def burst(tiers: Sequence[Tier], *, again: bool = False, batch: int = 8) -> list[WriteStatus]:
    """Every tier writes its share of NUM_BLOCKS as fast as it can; with `again`, what is refused until it is not."""

    def write(tier: Tier, mine: Sequence[int]) -> list[WriteStatus]:
        answers: list[WriteStatus] = []
        for start in range(0, len(mine), batch):
            labels = mine[start : start + batch]
            items = [summed(*block) for block in zip(keys(labels), payloads(labels), strict=True)]
            statuses = tier.write(items)
            deadline = time.monotonic() + WAIT_S
            while again and any(status in REFUSED for status in statuses):
                assert time.monotonic() < deadline, statuses
                time.sleep(0.005)
                statuses = tier.write(items)
            answers += statuses
        return answers

    share = NUM_BLOCKS // len(tiers)
    with ThreadPoolExecutor(len(tiers)) as executor:
        shares = [executor.submit(write, tier, range(i * share, (i + 1) * share)) for i, tier in enumerate(tiers)]
        return [status for future in shares for status in future.result(2 * WAIT_S)]


def acknowledged(statuses: Sequence[WriteStatus]) -> list[int]:
    return [label for label, status in enumerate(statuses) if status in KEPT]


class Removals:
    """The keys that a tenant's event stream says memory has evicted."""

    def __init__(self, address: str, probe: PoolTier) -> None:
        """Returns when the stream is there: everything from now on is seen."""
        self.keys: list[StoreKey] = []
        self.num_lost = 0
        self._channel = grpc.insecure_channel(address)
        metadata = (("authorization", "Bearer " + TOKENS["red"]),)
        self._stream = self._channel.unary_stream("/kvtier.pool.v1.Pool/Events")(b"", metadata=metadata)
        self._seen = threading.Event()
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()
        probes: list[StoreKey] = []

        def is_heard() -> bool:
            probes.append(make_key(("probe", len(probes))))
            probe.write([summed(probes[-1], b"p")])
            return self._seen.is_set()

        until(is_heard)
        probe.discard(probes)

    def _listen(self) -> None:
        with contextlib.suppress(grpc.RpcError):
            for message in self._stream:
                batch = pool_pb2.EventBatch.FromString(message)
                self.num_lost += batch.lost
                for event in batch.events:
                    if event.kind == pool_pb2.Event.REMOVED and event.tier == "memory":
                        self._add(event)
                self._seen.set()

    def _add(self, event: pool_pb2.Event) -> None:
        for group in event.keys:
            hashes = group.hashes
            self.keys += [StoreKey(RED + group.namespace_id + hashes[at : at + 32]) for at in range(0, len(hashes), 32)]

    def close(self) -> None:
        self._stream.cancel()
        self._thread.join(WAIT_S)
        self._channel.close()


class TestOverADisk:
    @pytest.mark.parametrize("path", PATHS)
    def test_every_acknowledged_block_is_readable_at_the_end(self, tmp_path: Path, path: str) -> None:
        with (
            burst_pool(disk_dir=tmp_path, disk_bytes=DISK_BYTES, disk_reserve_bytes=0) as addresses,
            clients(addresses, path, 4) as tiers,
        ):
            statuses = burst(tiers)
            assert set(statuses) <= {*KEPT, *REFUSED}
            kept = acknowledged(statuses)
            assert len(kept) >= MEMORY_BYTES // BLOCK_BYTES // 4  # what may wait for the disk at any time
            assert read_blocks(tiers[0], keys(kept), BLOCK_BYTES) == payloads(kept)

    @pytest.mark.parametrize("path", PATHS)
    def test_a_writer_that_tries_again_gets_all_of_it_in(self, tmp_path: Path, path: str) -> None:
        with (
            burst_pool(disk_dir=tmp_path, disk_bytes=DISK_BYTES, disk_reserve_bytes=0) as addresses,
            clients(addresses, path, 4) as tiers,
        ):
            assert set(burst(tiers, again=True)) <= set(KEPT)
            everything = range(NUM_BLOCKS)
            assert read_blocks(tiers[0], keys(everything), BLOCK_BYTES) == payloads(everything)

    def test_a_slow_disk_slows_writers_down_and_loses_nothing(self, tmp_path: Path) -> None:
        class SlowFiles(OsFiles):
            def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
                time.sleep(0.002 * sum(map(len, buffers)) / BLOCK_BYTES)
                super().write(fd, buffers, offset)

        files = GatedFiles(SlowFiles(direct=False))
        with core_rig(tmp_path, memory_bytes=MIB, queue_bytes=MIB // 4, files=files) as rig:
            rig.files.may_write.clear()  # else it might be faster than we are
            statuses = [rig.store(label) for label in range(8)]
            assert WriteStatus.THROTTLED in statuses
            rig.files.may_write.set()
            statuses += [rig.store(label) for label in range(8, 200)]
            kept = acknowledged(statuses)
            assert rig.load(keys(kept)) == payloads(kept)
            assert rig.count("kvtier_pool_evicted_unwritten_total", tier="disk") == 0

    def test_cold_reads_do_not_push_out_what_waits_for_the_disk(self, tmp_path: Path, remote: RemoteTier) -> None:
        """All that is promised to the disk waits; a hundred blocks come up from the tier below it meanwhile."""
        remote.fill(range(1000, 1100))
        with core_rig(tmp_path, memory_bytes=MIB, queue_bytes=6 * BLOCK_BYTES, remote=remote) as rig:
            rig.files.may_write.clear()
            statuses = [rig.store(label) for label in range(10)]
            assert statuses == [WriteStatus.STORED] * 6 + [WriteStatus.THROTTLED] * 4
            for label in range(1000, 1100):
                assert rig.load(keys([label])) == payloads([label])
            assert rig.load(keys(range(6))) == payloads(range(6))
            assert rig.count("kvtier_pool_evicted_unwritten_total", tier="disk") > 0, "copies nobody was promised"

    def test_a_block_larger_than_the_queue_is_kept_too(self, tmp_path: Path) -> None:
        with core_rig(tmp_path, queue_bytes=BLOCK_BYTES) as rig:
            rig.files.may_write.clear()
            assert rig.store("a", nbytes=4 * BLOCK_BYTES) is WriteStatus.STORED
            assert rig.store("b") is WriteStatus.THROTTLED
            rig.files.may_write.set()
            until(lambda: rig.store("b") is WriteStatus.STORED)
            rig.core.drain(WAIT_S)
        with core_rig(tmp_path) as rig:
            assert rig.load(keys(["a"]), 4 * BLOCK_BYTES) == [make_payload("a", 4 * BLOCK_BYTES)]
            assert rig.load(keys(["b"])) == payloads(["b"])

    def test_a_write_that_was_under_way_is_kept_although_too_much_waits_by_then(self, tmp_path: Path) -> None:
        with core_rig(tmp_path, queue_bytes=2 * BLOCK_BYTES) as rig:
            rig.files.may_write.clear()
            header = parse_header(encode_header(make_key("early"), make_payload("early", BLOCK_BYTES)))
            slot = rig.core.begin_write(RED, header.key, header.stored_length)
            assert isinstance(slot, WriteSlot)
            assert [rig.store(i) for i in range(3)] == [WriteStatus.STORED] * 2 + [WriteStatus.THROTTLED]
            slot.view[:] = make_payload("early", BLOCK_BYTES)
            assert rig.core.commit_write(slot, header) is WriteStatus.STORED
            rig.files.may_write.set()
            (report,) = rig.core.drain(WAIT_S)
            assert (report.num_written, report.num_memory_only) == (3, 0)

    def test_a_block_lost_before_it_could_be_pinned_is_not_acknowledged(self, tmp_path: Path) -> None:
        with core_rig(tmp_path) as rig:
            publish = rig.core._hub.publish

            def lose(event: Event) -> None:
                """The thread that commits is here before it pins: memory takes the room back."""
                publish(event)
                if event.kind is EventKind.STORED and event.tier == "memory":
                    rig.core._memory.discard(event.keys)

            rig.core._hub.publish = lose  # type: ignore[method-assign]
            assert rig.store("a") is WriteStatus.THROTTLED
            rig.core._hub.publish = publish  # type: ignore[method-assign]
            assert rig.store("a") is WriteStatus.STORED

    @pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
    def test_a_disk_that_takes_nothing_refuses_nobody(
        self, tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A dead one, and one that neighbours have filled: the pool is one in memory until it is back."""
        monkeypatch.setattr("kvtier.store.write_workers._RETRY_S", 3600.0)  # then it is given more to refuse
        faulty = FaultyFiles(OsFiles(direct=False))
        faulty.fail_next("write", code, times=10_000)
        with core_rig(
            tmp_path, memory_bytes=MIB, queue_bytes=MIB // 4, files=GatedFiles(faulty), event_buffer=10_000
        ) as rig:
            subscription = rig.core.subscribe(RED)
            assert rig.store("first") is WriteStatus.STORED
            until(lambda: rig.count("kvtier_pool_write_down_queue_bytes", tier="disk") == 0)
            statuses = [rig.store(label) for label in range(200)]
            assert statuses == [WriteStatus.STORED] * 200
            there = [block is not None for block in rig.load(keys(range(200)))]
            assert 0 < there.count(True) < 200
            batch = subscription.wait()
            assert batch is not None
            removed = [key for event in batch.events if event.kind is EventKind.REMOVED for key in event.keys]
            assert set(removed) >= {key for key, is_there in zip(keys(range(200)), there, strict=True) if not is_there}
            assert rig.count("kvtier_pool_evicted_unwritten_total", tier="disk") == len(removed)

    @pytest.mark.parametrize("policy", [WritePolicy.WRITE_BACK, WritePolicy.WRITE_THROUGH_SELECTIVE])
    def test_other_policies_forget_with_an_event(self, tmp_path: Path, policy: WritePolicy) -> None:
        with core_rig(tmp_path, memory_bytes=MIB, policy=policy, event_buffer=10_000) as rig:
            rig.files.may_write.clear()
            subscription = rig.core.subscribe(RED)
            assert [rig.store(label) for label in range(100)] == [WriteStatus.STORED] * 100
            there = rig.core.lookup(keys(range(100)))
            batch = subscription.wait()
            assert batch is not None
            removed = [key for event in batch.events if event.kind is EventKind.REMOVED for key in event.keys]
            assert there.count(Status.HIT) + len(removed) == 100


class TestOverMemoryAlone:
    @pytest.mark.parametrize("path", PATHS)
    def test_what_was_acknowledged_is_readable_or_evicted_with_an_event(self, path: str) -> None:
        limits = PoolLimits(event_buffer=100_000)
        with (
            burst_pool(limits=limits) as addresses,
            clients(addresses, path, 4) as tiers,
            contextlib.closing(Removals(addresses.grpc[0], tiers[0])) as removals,
        ):
            kept = acknowledged(burst(tiers))
            assert len(kept) > MEMORY_BYTES // BLOCK_BYTES
            found = read_blocks(tiers[0], keys(kept), BLOCK_BYTES)
            expected = payloads(kept)
            assert all(block in (None, payload) for block, payload in zip(found, expected, strict=True))
            missing = {key for key, block in zip(keys(kept), found, strict=True) if block is None}
            until(lambda: missing <= set(removals.keys))
            evicted = [key for key in removals.keys if key in set(keys(kept))]
            assert (len(evicted), removals.num_lost) == (len(missing), 0), "each once"
            assert len(found) - found.count(None) + len(evicted) == len(kept)

    @pytest.mark.parametrize("path", PATHS)
    def test_writers_hear_full_before_a_young_block_is_evicted(self, path: str) -> None:
        with burst_pool(min_residency_s=600.0) as addresses, clients(addresses, path, 4) as tiers:
            statuses = burst(tiers)
            assert set(statuses) == {WriteStatus.STORED, WriteStatus.FULL}
            kept = acknowledged(statuses)
            assert len(kept) > NUM_BLOCKS // 8
            assert read_blocks(tiers[0], keys(kept), BLOCK_BYTES) == payloads(kept)

    def test_they_are_evicted_when_they_are_old_enough(self) -> None:
        with burst_pool(min_residency_s=0.5) as addresses, clients(addresses, "block", 4) as tiers:
            started = time.monotonic()
            assert set(burst(tiers, again=True)) <= set(KEPT)
            assert time.monotonic() - started > 3 * 0.5 * 0.9, "four times the memory cannot have been younger"

    def test_residency_does_not_hold_up_writers_above_a_disk(self, tmp_path: Path) -> None:
        arguments = {"disk_dir": tmp_path, "disk_bytes": DISK_BYTES, "disk_reserve_bytes": 0, "min_residency_s": 600.0}
        with burst_pool(**arguments) as addresses, clients(addresses, "block", 2) as tiers:
            assert set(burst(tiers, again=True)) <= set(KEPT)


class TestOverARemoteTier:
    def test_one_that_hangs_refuses_nobody(self, remote: RemoteTier) -> None:
        """Its writers hold 32 blocks at the most; what is queued gives its room back."""
        remote.may_write.clear()
        with core_rig(remote=remote, memory_bytes=4 * MIB, queue_bytes=64 * MIB) as rig:
            statuses = [rig.store(label) for label in range(200)]
            assert statuses == [WriteStatus.STORED] * 200
            assert rig.count("kvtier_pool_written_down_blocks_total", tier="redis", result="dropped") > 0
            assert rig.count("kvtier_pool_evicted_unwritten_total", tier="redis") > 0
            remote.may_write.set()
            (report,) = rig.core.drain(WAIT_S)
            assert (report.num_abandoned, report.num_memory_only) == (0, 0)

    def test_it_does_not_loosen_what_the_disk_keeps(self, tmp_path: Path, remote: RemoteTier) -> None:
        remote.may_write.clear()
        with core_rig(tmp_path, remote=remote, memory_bytes=4 * MIB, queue_bytes=64 * MIB) as rig:
            rig.files.may_write.clear()
            statuses = [rig.store(label) for label in range(200)]
            assert set(statuses) == {WriteStatus.STORED, WriteStatus.FULL}
            kept = acknowledged(statuses)
            assert rig.load(keys(kept)) == payloads(kept)
            rig.files.may_write.set()
            remote.may_write.set()
            disk, _ = rig.core.drain(WAIT_S)
            assert (disk.num_written, disk.num_memory_only) == (len(kept), 0)
