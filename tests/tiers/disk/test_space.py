"""What a disk tier keeps in the room it has: what goes first, what is moved, whose share is whose, what others get."""

import itertools
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from disk_rig import WeighedFiles, used_bytes
from disk_tier_rig import KIB, MIB, NBYTES, Open, block, load, loaded, reopening, value
from kvtier.identity.keys import tenant_id
from kvtier.metrics import Metrics
from kvtier.testing.blocks import TENANT, summed
from kvtier.testing.contract import make_key, make_payload, read_blocks
from kvtier.tiers.base import Status, WriteStatus
from kvtier.tiers.disk.medium.files import OsFiles

BLUE = tenant_id("blue")


@pytest.fixture
def open_disk(tmp_path: Path) -> Iterator[Open]:
    with reopening(tmp_path / "disk") as open_one:
        yield open_one


def test_files_never_take_more_than_the_capacity(tmp_path: Path, open_disk: Open) -> None:
    capacity_bytes = MIB
    files = WeighedFiles(tmp_path / "disk")
    tier = open_disk(capacity_bytes, files=files)
    with ThreadPoolExecutor(4) as executor:
        list(executor.map(lambda i: tier.write([block((i, j)) for j in range(3)]), range(60)))
    assert capacity_bytes // 2 <= max(files.seen) <= capacity_bytes
    tier.check()
    assert tier.usage().used_bytes == used_bytes(tmp_path / "disk")
    assert tier.write([summed(make_key("large"), bytes(capacity_bytes))]) == [WriteStatus.FULL]
    assert tier.usage().num_blocks > 0


def test_a_payload_larger_than_a_segment_gets_one_of_its_own(tmp_path: Path, open_disk: Open) -> None:
    tier = open_disk(MIB)
    payload = make_payload("large", 300 * KIB)
    assert tier.write([summed(make_key("large"), payload), block("a")]) == [WriteStatus.STORED] * 2
    assert read_blocks(tier, [make_key("large")], len(payload)) == [payload]
    assert load(tier, "a") == block("a")[1]


def test_the_tier_shrinks_to_leave_the_reserve_free(
    tmp_path: Path, open_disk: Open, caplog: pytest.LogCaptureFixture
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
    assert tier.usage().capacity_bytes <= 300 * KIB, "what can be had, not what was configured"
    files.size_bytes = MIB
    assert "no room" not in caplog.text
    assert caplog.text.count("others have taken space of its file system: ") == 1
    statuses = [tier.write([block((i, "none"))])[0] for i in range(10)]
    assert statuses[-1] is WriteStatus.FULL
    assert "left to others" in caplog.text


def test_a_block_larger_than_the_tier_is_told_as_that(open_disk: Open, caplog: pytest.LogCaptureFixture) -> None:
    tier = open_disk(2 * MIB, reserve_bytes=0)
    assert tier.write([summed(make_key("large"), bytes(2_200_000))]) == [WriteStatus.FULL]
    assert "no room for a file of 2,215,936 bytes: the tier has 2,097,152, of which 2,031,616 are for" in caplog.text
    assert "left to others" not in caplog.text


def test_whoever_has_most_gives_first(open_disk: Open) -> None:
    tier = open_disk(MIB, segment_bytes=64 * KIB)
    small = [summed(make_key(i, tenant=BLUE), make_payload(i, NBYTES)) for i in range(3)]
    tier.write(small)
    for i in range(300):
        assert tier.write([block(i)]) == [WriteStatus.STORED]
    assert tier.lookup([key for key, _, _ in small]) == [Status.HIT] * 3
    assert tier.usage_of(BLUE).num_blocks == 3
    assert tier.usage_of(TENANT).num_blocks == tier.usage().num_blocks - 3


def test_what_was_read_is_kept_and_what_was_looked_up_is_not(open_disk: Open) -> None:
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


def test_the_start_of_a_prompt_is_there_as_long_as_the_end_that_was_missed(open_disk: Open) -> None:
    """A reader finds the start, and writes the end again: without the start, the end is worth nothing."""
    tier = open_disk(MIB, segment_bytes=64 * KIB)
    start, end = make_key("start"), make_key("end")
    tier.write([block("start"), block("end")])
    labels = itertools.count()
    assert load(tier, "start") == block("start")[1]
    while tier.lookup([end]) == [Status.HIT]:
        tier.write([block(next(labels))])
    for _ in range(20):
        tier.write([block(next(labels))])
    assert load(tier, "start") == block("start")[1]
    tier.write([block("end")])
    while tier.lookup([end]) == [Status.HIT]:
        assert tier.lookup([start]) == [Status.HIT]
        tier.write([block(next(labels))])


def test_moving_has_a_bound(open_disk: Open) -> None:
    tier = open_disk(MIB, segment_bytes=64 * KIB, write_amplification=1.1)
    for i in range(400):
        tier.write([block(i)])
        loaded(tier, range(max(0, i - 40), i + 1))
    assert 1.05 < tier.write_amplification() <= 1.1


def test_a_skewed_load_hits_about_as_often_as_with_an_lru(open_disk: Open) -> None:
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
        tier.write([summed(make_key(i), make_payload(i, nbytes)) for i in missing])
        for i in batch:
            lru_hits += i in lru
            lru.pop(i, None)
            lru[i] = None
            if len(lru) > capacity:
                del lru[next(iter(lru))]
    print(f"log {hits / len(labels):.3f}, LRU {lru_hits / len(labels):.3f}, {tier.write_amplification():.2f}")
    assert hits >= lru_hits - 0.03 * len(labels)
