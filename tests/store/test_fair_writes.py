"""One tenant writes more than the tiers below take; another one writes a little beside it."""

import contextlib
import urllib.request
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

import pytest

from configured_pool import BOSS, digest
from gated_files import GatedFiles
from kvtier.events import Event, EventKind
from kvtier.identity.keys import StoreKey, TenantId, tenant_of
from kvtier.memory.buffers import ReadableBuffer
from kvtier.testing.contract import make_key, read_blocks
from kvtier.tiers.base import Item, Status, WriteStatus
from kvtier.tiers.common.write_policy import WritePolicy
from kvtier.tiers.disk import tier as disk
from pool_rig import BLOCK_BYTES, BLUE, MIB, RED, WAIT_S, connect, core_rig, items, keys, payloads, running_pool, until
from remote_tier import RemoteTier, remote_tier

remote = pytest.fixture(remote_tier)
BATCH = 4
OPERATORS = {"operators": {"boss": {"token_sha256": [digest(BOSS)]}}}


def unwritten(http: str, tenant: str, status: str) -> float:
    """What an operator reads on the page of `/metrics`."""
    sample = f'kvtier_pool_tenant_unwritten_blocks_total{{status="{status}",tenant="{tenant}"}} '
    request = urllib.request.Request(f"http://{http}/metrics", headers={"Authorization": f"Bearer {BOSS}"})
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
        lines = answer.read().decode().splitlines()
    (line,) = (line for line in lines if line.startswith(sample))
    return float(line.removeprefix(sample))


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """One writer, batches and turns of few blocks: what is with writers is little beside what waits."""
    monkeypatch.setattr("kvtier.store.write_workers._NUM_THREADS", 1)
    monkeypatch.setattr("kvtier.store.write_workers._BATCH_BLOCKS", BATCH)
    monkeypatch.setattr("kvtier.store.fair_queue._TURN_BYTES", BATCH * BLOCK_BYTES)


@pytest.mark.usefixtures("small_batches")
def test_what_one_has_waiting_for_a_slow_disk_keeps_no_other_waiting(tmp_path: Path) -> None:
    with core_rig(tmp_path, memory_bytes=16 * MIB, queue_bytes=64 * BLOCK_BYTES) as rig:
        publish, landed = rig.core._hub.publish, list[StoreKey]()

        def note(event: Event) -> None:
            publish(event)
            if event.tier == "disk" and event.kind is EventKind.STORED:
                landed.extend(event.keys)

        rig.core._below.tiers[0]._parts.events._sink = note  # type: ignore[attr-defined]
        rig.files.may_write.clear()
        reds = [rig.store(i, tenant=RED) for i in range(80)]
        assert reds == [WriteStatus.STORED] * 64 + [WriteStatus.THROTTLED] * 16
        blues = [rig.store(i, tenant=BLUE) for i in range(40)]
        assert blues == [WriteStatus.STORED] * 32 + [WriteStatus.THROTTLED] * 8
        rig.files.may_write.set()
        (report,) = rig.core.drain(WAIT_S)
        assert (report.num_abandoned, report.num_memory_only) == (0, 0)
        assert sorted(landed) == sorted(keys(range(64), RED) + keys(range(32), BLUE))
        for i, key in enumerate(keys(range(32), BLUE)):
            assert landed.index(key) <= 2 * (i + 1) + 3 * BATCH, "a batch that was with the writer, and turns of two"


@pytest.mark.usefixtures("small_batches")
def test_what_is_owed_at_the_end_is_written_in_turns(tmp_path: Path) -> None:
    """A stop has little time, and what it does not write is lost to its tenant."""
    with core_rig(tmp_path, policy=WritePolicy.WRITE_BACK) as rig:
        assert {rig.store(i, tenant=RED) for i in range(40)} == {WriteStatus.STORED}
        assert {rig.store(i, tenant=BLUE) for i in range(2)} == {WriteStatus.STORED}
        waiting = rig.core._below._ways[0]._waiting
        with waiting.changed:
            waiting.closing = True
            due = waiting.take_owed(None, BATCH)
            for key in due:  # given back: the writers take them in their turn
                waiting.finish(key, None)
                waiting.owe(key)
            waiting.closing = False
        assert sorted(due) == sorted(keys(range(2), RED) + keys(range(2), BLUE))


class _Flooded(RemoteTier):
    """With each batch that is written here, somebody stores as many blocks again: something always waits."""

    def __init__(self, store_more: Callable[[int], object]) -> None:
        super().__init__()
        self.batches: list[set[TenantId]] = []
        """Whose blocks came with each batch since the tier works."""
        self._store_more = store_more

    def write(self, items: Sequence[Item[ReadableBuffer]]) -> list[WriteStatus]:
        answers = super().write(items)
        if not self.fails:
            self.batches.append({tenant_of(key) for key, _, _ in items})
            if len(self.batches) < 50 and BLUE not in self.batches[-1]:
                self._store_more(len(items))
        return answers


@pytest.mark.usefixtures("small_batches")
def test_what_was_put_off_is_written_while_another_tenant_floods_without_end() -> None:
    labels = count()
    with contextlib.closing(_Flooded(lambda num: [rig.store(next(labels), tenant=RED) for _ in range(num)])) as remote:
        with core_rig(remote=remote) as rig:
            waiting = rig.core._below._ways[0]._waiting
            remote.fails = True
            assert rig.store("blue", tenant=BLUE) is WriteStatus.STORED
            until(lambda: waiting.num_memory_only == 1)
            remote.may_write.clear()
            assert {rig.store(next(labels), tenant=RED) for _ in range(4 * BATCH)} == {WriteStatus.STORED}
            remote.fails = False
            remote.may_write.set()
            until(lambda: any(BLUE in batch for batch in remote.batches))
        assert next(i for i, batch in enumerate(remote.batches) if BLUE in batch) <= 7
        assert remote.inner.lookup(keys(["blue"], BLUE)) == [Status.HIT]


def test_who_needs_memory_takes_back_what_most_is_queued_of(remote: RemoteTier) -> None:
    """A Redis hangs. Red fills memory, and what is queued for Redis gives way: its own blocks, not those of blue."""
    remote.may_write.clear()
    with core_rig(remote=remote, memory_bytes=8 * MIB, queue_bytes=64 * MIB) as rig:
        assert {rig.store(i, tenant=RED) for i in range(40)} == {WriteStatus.STORED}
        assert {rig.store(i, tenant=BLUE) for i in range(4)} == {WriteStatus.STORED}
        assert {rig.store(i, tenant=RED) for i in range(40, 300)} == {WriteStatus.STORED}
        assert rig.count("kvtier_pool_written_down_blocks_total", tier="redis", result="dropped") > 0
        waiting = rig.core._below._ways[0]._waiting
        with waiting.changed:
            assert all(map(waiting.is_on_its_way, keys(range(4), BLUE)))
        remote.may_write.set()


def test_engines_of_another_tenant_are_not_throttled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the wire, with a disk that stands still: red writes until the pool takes no more, blue writes a little."""
    files = GatedFiles()
    monkeypatch.setattr(disk, "OsFiles", lambda direct: files)
    settings = {"disk_dir": tmp_path, "disk_bytes": 64 * MIB, "disk_reserve_bytes": 0}
    with running_pool(16 * MIB, roles=OPERATORS, **settings) as addresses:
        red, blue = connect(addresses.block[0], "red"), connect(addresses.block[0], "blue")
        files.may_write.clear()
        stored, label = list[int](), 0
        while len(stored) == label:
            (status,) = red.write(items([label], RED))
            stored += [label] if status is WriteStatus.STORED else []
            label += 1
        assert status is WriteStatus.THROTTLED
        assert blue.write(items(range(16), BLUE)) == [WriteStatus.STORED] * 16
        assert red.write(items(["more"], RED)) == [WriteStatus.THROTTLED]
        files.may_write.set()
        until(lambda: red.write(items(["more"], RED)) == [WriteStatus.STORED])
        assert unwritten(addresses.http, "red", "throttled") >= 2, "an operator sees who is throttled"
        assert unwritten(addresses.http, "red", "full") == unwritten(addresses.http, "blue", "throttled") == 0
        assert read_blocks(blue, keys(range(16), BLUE), BLOCK_BYTES) == payloads(range(16))
        red.close()
        blue.close()
    with core_rig(tmp_path) as rig:
        assert None not in rig.load([make_key(i, tenant=BLUE) for i in range(16)])
        assert None not in rig.load([make_key(i, tenant=RED) for i in stored])
