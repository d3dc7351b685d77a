"""A pool whose disk fails, and works again: what the event stream, Usage and the metrics say."""

import contextlib
import errno
import itertools
import os
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

import pool_rig
from gated_files import GatedFiles
from kvtier.protocol import pool_pb2
from kvtier.testing.blocks import make_key, make_payload, summed
from kvtier.tiers.base import Status, WriteStatus
from kvtier.tiers.common.shares import Share
from kvtier.tiers.disk import tier as disk
from kvtier.tiers.disk.medium import health as health
from kvtier.tiers.disk.medium.files import OsFiles
from pool_grpc_rig import connect
from pool_rig import BLOCK_BYTES, BLUE, MIB, RED, TOKENS, WAIT_S, core_rig, keys, payloads, until

SERVICE = "/kvtier.pool.v1.Pool/"
CREDENTIALS = (("authorization", "Bearer " + TOKENS["red"]),)


class BrokenFiles(OsFiles):
    """Takes no bytes while it is `full`."""

    full = False

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(fd, buffers, offset)


def test_a_failing_disk_is_in_the_stream_in_usage_and_in_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = BrokenFiles(direct=False)
    monkeypatch.setattr(disk, "OsFiles", lambda direct: files)
    monkeypatch.setattr(health, "_PAUSE_S", 0.01)
    labels = itertools.count()
    with (
        pool_rig.running_pool(disk_dir=tmp_path / "disk", disk_bytes=64 * MIB, disk_reserve_bytes=0) as addresses,
        grpc.insecure_channel(addresses.grpc[0]) as channel,
        contextlib.closing(connect(addresses.grpc[0])) as tier,
        ThreadPoolExecutor(1) as executor,
    ):
        usage = channel.unary_unary(SERVICE + "Usage")
        stream = channel.unary_stream(SERVICE + "Events")(b"", metadata=CREDENTIALS, timeout=WAIT_S)

        def state() -> int:
            of_memory, of_disk = pool_pb2.UsageResponse.FromString(usage(b"", metadata=CREDENTIALS)).tiers
            assert of_memory.state == pool_pb2.TierUsage.WRITABLE
            return of_disk.state

        def heard(kind: int) -> bool:
            """Writes until the stream tells of it."""
            answer = executor.submit(_hear, stream, kind)
            while not answer.done():
                tier.write([summed(make_key(next(labels)), b"x")])
            return answer.result()

        assert heard(pool_pb2.Event.STORED)
        assert state() == pool_pb2.TierUsage.WRITABLE
        files.full = True
        assert heard(pool_pb2.Event.READ_ONLY)
        assert state() == pool_pb2.TierUsage.READ_ONLY
        with urllib.request.urlopen(f"http://{addresses.http}/metrics") as answer:
            assert 'kvtier_tier_state{state="read_only",tier="disk"} 1.0' in answer.read().decode()
        files.full = False
        assert heard(pool_pb2.Event.WRITABLE)
        assert state() == pool_pb2.TierUsage.WRITABLE
        stream.cancel()


def test_residency_counts_while_the_disk_takes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its writer heard to be kept must not be gone a moment later, whatever the disk does."""
    monkeypatch.setattr(health, "_PAUSE_S", 0.01)
    monkeypatch.setattr("kvtier.store.write_workers._RETRY_S", 0.05)
    broken = BrokenFiles(direct=False)
    with core_rig(tmp_path, files=GatedFiles(broken), memory_bytes=MIB, min_residency_s=3600.0) as rig:

        def stored(labels: Sequence[int]) -> list[WriteStatus]:
            statuses = []
            for label in labels:
                statuses.append(rig.store(label))
                until(lambda: not rig.core._below._ways[0]._waiting.pinned_bytes)
            return statuses

        assert stored(range(40)) == [WriteStatus.STORED] * 40
        broken.full = True
        statuses = stored(range(100, 140))
        assert set(statuses) == {WriteStatus.STORED, WriteStatus.FULL}
        kept = [label for label, status in zip(range(100, 140), statuses, strict=True) if status is WriteStatus.STORED]
        assert rig.load(keys(kept)) == payloads(kept)
        broken.full = False
        until(lambda: set(stored(range(200, 240))) == {WriteStatus.STORED})


def test_residency_counts_above_a_disk_that_is_smaller_than_memory(tmp_path: Path) -> None:
    with core_rig(tmp_path, memory_bytes=65 * MIB, queue_bytes=64 * MIB, min_residency_s=3600.0) as rig:
        payload_bytes = 2 * MIB
        statuses = [rig.store(label, nbytes=payload_bytes) for label in range(80)]
        kept = [label for label, status in enumerate(statuses) if status is WriteStatus.STORED]
        assert statuses.count(WriteStatus.FULL) + len(kept) == 80 > len(kept)
        assert rig.core.lookup(keys(kept)) == [Status.HIT] * len(kept)


def test_a_tenant_at_its_cap_of_the_disk_costs_nobody_else_what_is_acknowledged(tmp_path: Path) -> None:
    files = GatedFiles()
    with core_rig(tmp_path / "disk", queue_bytes=4 * BLOCK_BYTES, files=files) as rig:
        rig.core.set_shares({}, {RED: Share(cap_bytes=1)})

        def written_down(result: str) -> float:
            labels = {"tier": "disk", "result": result}
            return rig.registry.get_sample_value("kvtier_pool_written_down_blocks_total", labels) or 0.0

        assert rig.store(0) is WriteStatus.STORED
        until(lambda: written_down("full") == 1)
        files.may_write.clear()
        statuses = [rig.store(label, tenant=BLUE) for label in range(8)]
        assert (statuses[0], statuses[-1]) == (WriteStatus.STORED, WriteStatus.THROTTLED)
        assert rig.store(1) is WriteStatus.STORED, "the disk would not have it anyway"
        files.may_write.set()
        until(lambda: written_down("stored") == statuses.count(WriteStatus.STORED))


def _hear(stream: Iterator[bytes], kind: int) -> bool:
    """Reads on until there is an event of this kind about the disk."""
    for message in stream:
        events = [e for e in pool_pb2.EventBatch.FromString(message).events if (e.kind, e.tier) == (kind, "disk")]
        if events:
            return kind == pool_pb2.Event.STORED or not any(event.keys for event in events)
    return False


def test_a_block_whose_read_hangs_is_a_miss_and_can_be_written_meanwhile(tmp_path: Path) -> None:
    cold, labels = make_key(0), itertools.count(1)
    with core_rig(tmp_path, memory_bytes=MIB) as rig:
        until(lambda: rig.store(0) is WriteStatus.EXISTS)

        def is_cold() -> bool:
            rig.store(next(labels))
            return rig.core._memory.lookup([cold]) == [Status.MISS]

        until(is_cold)
        assert rig.core.lookup([cold]) == [Status.HIT]
        rig.core.hurry(0.2)
        rig.files.may_read.clear()
        assert rig.load([cold]) == [None]
        assert rig.core.degraded()
        assert rig.core.lookup([cold]) == [Status.MISS]
        assert rig.store(0) is WriteStatus.STORED
        payload = make_payload(0, BLOCK_BYTES)
        assert rig.load([cold]) == [payload]
        rig.files.may_read.set()
        until(lambda: not rig.core.degraded())
        assert rig.load([cold]) == [payload]
