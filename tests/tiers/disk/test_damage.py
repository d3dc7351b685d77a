"""A disk tier whose files are not what it wrote: flipped, cut and swapped bytes are misses, counted, and gone."""

import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import xxhash

from disk_forgetting_rig import SMALL, items
from disk_log_rig import NBYTES, block, counted, there
from disk_rig import contents, flip, killed, opened, overwrite, place_of, places, segments
from disk_rig import damage as damage_block
from kvtier.codec.stored_form import Codec
from kvtier.metrics import Metrics
from kvtier.testing.blocks import make_key, make_packable_payload, read_blocks, summed
from kvtier.tiers.base import Status, WriteStatus
from kvtier.tiers.disk.log.format import PAGE, Kind
from kvtier.tiers.disk.medium.files import OsFiles


def flip_in_header(folder: Path) -> None:
    flip(segments(folder)[0], 20)


def flip_in_head(folder: Path) -> None:
    flip(segments(folder)[0], PAGE + 80)


def flip_in_payload(folder: Path) -> None:
    path, offset, _ = place_of(folder, make_key(0))
    flip(path, offset + 10)


def flip_in_footer(folder: Path) -> None:
    path = segments(folder)[0]
    flip(path, path.stat().st_size - PAGE + 100)


def flip_in_trailer(folder: Path) -> None:
    path = segments(folder)[0]
    flip(path, path.stat().st_size - 20)


def cut_in_payload(folder: Path) -> None:
    path, offset, _ = place_of(folder, make_key(1))
    with path.open("r+b") as file:
        file.truncate(offset + 10)


def swap_records(folder: Path) -> None:
    (path, one, _), (_, other, _) = places(folder)[make_key(0)], places(folder)[make_key(1)]
    data = path.read_bytes()
    overwrite(path, one, data[other : other + 2 * PAGE])
    overwrite(path, other, data[one : one + 2 * PAGE])


def swap_segments(folder: Path) -> None:
    one, other = segments(folder)[:2]
    one.rename(folder / "x")
    other.rename(one)
    (folder / "x").rename(other)


def delete_a_segment(folder: Path) -> None:
    segments(folder)[0].unlink()


DAMAGES: dict[Callable[[Path], None], tuple[int, int]] = {
    # which of four blocks are lost, two in each of two segments, and how many damages are counted
    flip_in_header: (0, 0),  # the footer knows
    flip_in_head: (0, 0),  # likewise
    flip_in_payload: (1, 1),
    flip_in_footer: (0, 0),  # the extents know
    flip_in_trailer: (0, 0),
    cut_in_payload: (1, 0),  # torn, as by a crash
    swap_records: (2, 2),
    swap_segments: (4, 2),
    delete_a_segment: (2, 0),
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_is_a_miss_and_a_counter_and_gone(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    folder = tmp_path / "disk"
    for start in (0, 2):
        with opened(folder) as tier:
            tier.write([block(start), block(start + 1)])
    damage(folder)
    metrics = Metrics()
    num_lost, num_counted = DAMAGES[damage]
    found = there(folder, range(4), metrics)
    assert found.count(False) == num_lost
    assert counted(metrics, "kvtier_corrupt_blocks_total") == num_counted
    again = Metrics()
    assert there(folder, range(4), again) == found
    assert counted(again, "kvtier_corrupt_blocks_total") == 0, "it was dropped"
    with opened(folder) as tier:
        statuses = tier.write([block(i) for i in range(4)])
    assert statuses == [WriteStatus.EXISTS if ok else WriteStatus.STORED for ok in found]
    assert there(folder, range(4)) == [True] * 4


def test_a_header_and_a_footer_that_are_damaged_cost_the_segment(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    for start in (0, 2):
        with opened(folder) as tier:
            tier.write([block(start), block(start + 1)])
    flip_in_header(folder)
    flip_in_footer(folder)
    metrics = Metrics()
    assert there(folder, range(4), metrics) == [False, False, True, True]
    assert counted(metrics, "kvtier_corrupt_blocks_total") == 1
    assert len(segments(folder)) == 1


@pytest.mark.parametrize("damage", [flip_in_payload, swap_records], ids=lambda damage: damage.__name__)
def test_damage_while_the_tier_is_open(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    metrics = Metrics()
    with opened(tmp_path / "disk", metrics=metrics) as tier:
        tier.write([block(0), block(1)])
        damage(tmp_path / "disk")
        assert read_blocks(tier, [make_key(0)], NBYTES) == [None]
        assert tier.lookup([make_key(0)]) == [Status.MISS]
        assert counted(metrics, "kvtier_corrupt_blocks_total") == 1
        assert tier.write([block(0)]) == [WriteStatus.STORED]
        assert read_blocks(tier, [make_key(0)], NBYTES) == [block(0)[1]]


def test_damaged_blocks_of_a_read_are_dropped_together(tmp_path: Path) -> None:
    num_writes = 0

    class Counting(OsFiles):
        def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
            nonlocal num_writes
            num_writes += 1
            super().write(fd, buffers, offset)

    metrics = Metrics()
    with opened(tmp_path / "disk", files=Counting(direct=False), metrics=metrics) as tier:
        tier.write(items(range(200)))
        for i in range(0, 200, 2):
            damage_block(tmp_path / "disk", make_key(i))
        num_writes = 0
        hits = [block is not None for block in read_blocks(tier, [make_key(i) for i in range(200)], SMALL)]
        assert hits == [i % 2 == 1 for i in range(200)]
        assert num_writes <= 3
        assert metrics.registry.get_sample_value("kvtier_corrupt_blocks_total", {"tier": "disk"}) == 100


def test_a_packed_block_of_an_attacker_is_dropped(tmp_path: Path) -> None:
    """The checksum of the packed form is right, what is packed is not."""
    key, payload = make_key("a"), make_packable_payload("a", 2 * NBYTES)
    folder = tmp_path / "disk"
    with opened(folder, codec=Codec.LZ4) as tier:
        tier.write([summed(key, payload)])
        killed(folder, tmp_path / "copy")
    folder = tmp_path / "copy"
    path, offset, nbytes = place_of(folder, key)
    data = bytearray(path.read_bytes())
    data[offset + 16 : offset + 20] = b"\xff" * 4  # where the first packed block begins
    header = offset - PAGE + 72
    end = offset + nbytes - 8
    checked = bytes(data[header : header + 96]) + bytes(data[offset:end])
    data[end : end + 8] = struct.pack("<Q", xxhash.xxh3_64_intdigest(checked))
    path.write_bytes(data)
    metrics = Metrics()
    with opened(folder, metrics=metrics) as tier:
        assert tier.lookup([key]) == [Status.HIT]
        assert read_blocks(tier, [key], 2 * NBYTES) == [None]
        assert tier.write([summed(key, payload)]) == [WriteStatus.STORED]
    assert counted(metrics, "kvtier_corrupt_blocks_total") == 1


def test_a_footer_is_read_again_before_a_scan_that_may_miss_tombstones(tmp_path: Path) -> None:
    class Flipping(OsFiles):
        armed = False

        def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            done = super().read(fd, buffers, offset)
            if self.armed and bytes(buffers[-1][-32:-24]) == b"KVTTRAIL":
                self.armed = False
                buffers[-1][-1] ^= 1
            return done

    files = Flipping(direct=False)
    with opened(tmp_path / "disk", files=files) as tier:
        tier.write(items(range(3)))
        tier.discard([make_key(1)])
        tier._parts.log.retire_all()
        (segment,) = tier._parts.state.segments
        (path,) = segments(tmp_path / "disk")
        place = contents(path)
        assert place.sealed
        head = int((place.entries["kind"] == Kind.FORGET).argmax())
        overwrite(path, (int(place.entries["page"][head]) - 1) * PAGE, bytes(PAGE))
        files.armed = True
        entries = tier._parts.files.entries(segment)
        assert not files.armed
        assert entries is not None
        assert entries["kind"].tolist() == [Kind.RECORD] * 3 + [Kind.FORGET]
