"""The log on disk: its golden bytes, what a start makes of damage, tombstones, and the index in memory."""

import errno
import hashlib
import os
import random
import shutil
import signal
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import xxhash

from disk_rig import contents, flip, killed, num_blocks, opened, overwrite, place_of, places, segments, used_bytes
from kvtier.codec import HEADER_DTYPE, Codec, encode_header, parse_stored_header, well_formed
from kvtier.errors import ConfigError, CorruptBlockError
from kvtier.keys import StoreKey, tenant_id
from kvtier.metrics import Metrics
from kvtier.testing.blocks import NAMESPACE, TENANT, make_key, make_packable_payload, make_payload, read_blocks
from kvtier.testing.faults import FaultyFiles
from kvtier.tiers.base import Status, WriteStatus
from kvtier.tiers.disk import DiskTier
from kvtier.tiers.disk_log import format as disk_format
from kvtier.tiers.disk_log.format import PAGE, Kind, SegmentId, keys_of
from kvtier.tiers.disk_log.index import RECORD, RecordIndex, tags_of
from kvtier.tiers.disk_log.survey import survey
from kvtier.tiers.files import OsFiles

KIB, MIB = 2**10, 2**20
NBYTES = 5_000
BLUE = tenant_id("blue")
GOLDEN = Path(__file__).parent / "golden"


def block(label: object) -> tuple[StoreKey, bytes]:
    return make_key(label), make_payload(label, NBYTES)


def there(folder: Path, labels: Sequence[object], metrics: Metrics | None = None) -> list[bool]:
    """What a start finds, by what can be read; and never anything wrong."""
    with opened(folder, metrics=metrics) as tier:
        found = read_blocks(tier, [make_key(i) for i in labels], NBYTES)
    assert all(payload in (None, block(i)[1]) for i, payload in zip(labels, found, strict=True))
    return [payload is not None for payload in found]


def counted(metrics: Metrics, name: str) -> float:
    return metrics.registry.get_sample_value(name, {"tier": "disk"}) or 0.0


class TestFormat:
    """Bytes that may only change together with the version."""

    SEGMENT = SegmentId(7, TENANT, bytes(range(16)))

    def golden(self) -> bytes:
        """A segment of two records, one packed, and a tombstone."""
        packed = make_packable_payload("packed", 600)
        headers = [encode_header(make_key("a"), b"payload"), encode_header(make_key("b"), packed)]
        records = disk_format.make_entries(headers, [5, 5], [2, 3], [Kind.RECORD] * 2)
        forget = disk_format.make_entries([encode_header(make_key("c"), b"")], [6], [0], [Kind.FORGET])
        pages = [
            disk_format.pack_header(self.SEGMENT, 4),
            disk_format.pack_extent_head(self.SEGMENT, 1, 3, records),
            b"payload".ljust(PAGE, b"\0"),
            packed.ljust(PAGE, b"\0"),
            disk_format.pack_extent_head(self.SEGMENT, 4, 1, forget),
            disk_format.pack_footer(self.SEGMENT, 5, np.concatenate([records, forget])),
        ]
        return b"".join(pages)

    def test_a_segment_is_what_it_was(self) -> None:
        assert self.golden() == (GOLDEN / "00000007.segment").read_bytes()

    def test_a_segment_of_then_is_read_now(self, tmp_path: Path) -> None:
        (tmp_path / "disk").mkdir()
        (tmp_path / "disk" / "kvtier-disk-tier").write_text("kvtier disk tier, format 2\n")
        shutil.copy(GOLDEN / "00000007.segment", tmp_path / "disk")
        with opened(tmp_path / "disk") as tier:
            assert read_blocks(tier, [make_key("a")], 7) == [b"payload"]
            assert read_blocks(tier, [make_key("b")], 600) == [make_packable_payload("packed", 600)]
            tier.write([block("new")])
        assert [path.name for path in segments(tmp_path / "disk")] == ["00000007.segment", "00000008.segment"]
        assert (tmp_path / "disk" / "00000007.segment").read_bytes() == self.golden(), "sealed is sealed"

    def test_an_array_of_headers_is_judged_like_one(self) -> None:
        """Every bit of a header, flipped."""
        headers = []
        good = encode_header(make_key("a"), b"payload")
        for bit in range(8 * len(good)):
            changed = bytearray(good)
            changed[bit // 8] ^= 1 << bit % 8
            headers.append(bytes(changed))

        def parses(header: bytes) -> bool:
            try:
                parse_stored_header(header)
            except CorruptBlockError:
                return False
            return True

        assert well_formed(np.frombuffer(b"".join(headers), HEADER_DTYPE)).tolist() == [parses(h) for h in headers]

    def test_a_payload_that_looks_like_an_extent_is_none(self, tmp_path: Path) -> None:
        """Whoever writes blocks knows everything of the format but the nonce."""
        fake = disk_format.make_entries([encode_header(make_key("victim"), b"evil")], [9], [5], [Kind.RECORD])
        with opened(tmp_path / "disk") as tier:
            head = disk_format.pack_extent_head(SegmentId(1, TENANT, bytes(16)), 4, 2, fake)
            tier.write([(make_key("trap"), head + b"evil".ljust(PAGE, b"\0"))])
            tier.write([block("after")])
            killed(tmp_path / "disk", tmp_path / "copy")
        path = segments(tmp_path / "copy")[0]
        flip(path, PAGE + 100)  # the head of the trap's extent: the scan looks for the next one
        with opened(tmp_path / "copy") as tier:
            assert tier.lookup([make_key("victim"), make_key("after")]) == [Status.MISS, Status.HIT]


class TestStart:
    def test_finds_what_was_sealed_and_what_was_not(self, tmp_path: Path) -> None:
        folder = tmp_path / "disk"
        with opened(folder, segment_bytes=64 * KIB) as tier:
            for i in range(20):
                tier.write([block((i, j)) for j in range(3)])
            killed(folder, tmp_path / "copy")
        labels = [(i, j) for i in range(20) for j in range(3)]
        metrics = Metrics()
        assert there(folder, labels, metrics) == [True] * 60
        assert there(tmp_path / "copy", labels, metrics) == [True] * 60
        assert counted(metrics, "kvtier_corrupt_blocks_total") == counted(metrics, "kvtier_disk_torn_blocks_total") == 0
        assert all(contents(path).sealed for path in segments(tmp_path / "copy")), "a start seals"

    def test_goes_on_behind_what_is_there(self, tmp_path: Path) -> None:
        folder = tmp_path / "disk"
        for i in range(5):
            with opened(folder) as tier:
                tier.write([block(i)])
        assert there(folder, range(5)) == [True] * 5
        epochs = [int(contents(path).entries["epoch"][0]) for path in segments(folder)]
        assert epochs == sorted(set(epochs))

    def test_cuts_a_torn_tail_wherever_it_was_torn(self, tmp_path: Path) -> None:
        """At every page of the last extent, and around the edges of its head, entries, payloads."""
        folder = tmp_path / "disk"
        with opened(folder) as tier:
            tier.write([block("a")])
            killed(folder, tmp_path / "before")
            tier.write([block("b"), block("c")])
            killed(folder, tmp_path / "after")
        before, after = (segments(tmp_path / name)[0].read_bytes() for name in ("before", "after"))
        _, start, _ = place_of(tmp_path / "after", make_key("b"))
        start -= PAGE
        end = start + 5 * PAGE
        edges = {0, 1, 7, 8, 63, 64, 71, 72, 73, 72 + 112, 72 + 224, PAGE - 1, PAGE, PAGE + 1}
        edges |= {PAGE + NBYTES - 1, PAGE + NBYTES, 3 * PAGE, 3 * PAGE + 1, 3 * PAGE + NBYTES - 1, 5 * PAGE}
        for cut in sorted(edges):
            torn = after[: start + cut] + before[start + cut : end] + after[end:]
            shutil.rmtree(tmp_path / "torn", ignore_errors=True)
            shutil.copytree(tmp_path / "before", tmp_path / "torn")
            segments(tmp_path / "torn")[0].write_bytes(torn)
            metrics = Metrics()
            found = there(tmp_path / "torn", "abc", metrics)
            whole = [cut >= PAGE + NBYTES, cut >= 3 * PAGE + NBYTES]  # their extent's head is one page
            assert found == [True, *whole], cut
            expected = 2 - sum(whole) if cut >= 72 + 224 else 0
            assert counted(metrics, "kvtier_disk_torn_blocks_total") == expected, cut
            assert there(tmp_path / "torn", "abc") == found, "the second start finds the same"

    def test_a_file_that_was_just_made_is_removed(self, tmp_path: Path) -> None:
        folder = tmp_path / "disk"
        with opened(folder) as tier:
            tier.write([block("a")])
        (folder / "00000005.segment").write_bytes(bytes(64 * KIB))
        (folder / "00000006.segment").write_bytes(b"")
        metrics = Metrics()
        assert there(folder, "a", metrics) == [True]
        assert counted(metrics, "kvtier_corrupt_blocks_total") == 0
        assert len(segments(folder)) == 1

    def test_with_less_capacity_keeps_what_was_written_last(self, tmp_path: Path) -> None:
        folder = tmp_path / "disk"
        with opened(folder, segment_bytes=64 * KIB) as tier:
            for i in range(60):
                tier.write([block(i)])
        with opened(folder, 256 * KIB) as tier:
            found = [status is Status.HIT for status in tier.lookup([make_key(i) for i in range(60)])]
            assert used_bytes(folder) <= 256 * KIB
        assert 10 < found.count(True) < 30
        assert found == sorted(found)

    def test_leaves_foreign_files_alone(self, tmp_path: Path) -> None:
        folder = tmp_path / "disk"
        with opened(folder) as tier:
            tier.write([block("a")])
        foreign = [folder / name for name in ("notes.txt", "00000009.segment", "00000000.segment", "0000000A.segment")]
        for path in foreign:
            path.write_bytes(b"mine".ljust(PAGE, b"x"))
        (folder / "0000000b.segment").mkdir()
        metrics = Metrics()
        with opened(folder, metrics=metrics) as tier:
            tier.write([block("b")])
        assert counted(metrics, "kvtier_foreign_files_total") == 5
        assert all(path.read_bytes().startswith(b"mine") for path in foreign)
        assert there(folder, "ab") == [True, True]

    def test_refuses_a_newer_segment_and_changes_nothing(self, tmp_path: Path) -> None:
        folder = tmp_path / "disk"
        with opened(folder) as tier:
            tier.write([block("a")])
        path = segments(folder)[0]
        header = bytearray(path.read_bytes()[:72])
        header[8:12] = struct.pack("<I", 3)
        header[64:72] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(header[:64])))
        overwrite(path, 0, bytes(header))
        before = path.read_bytes()
        with pytest.raises(ConfigError, match=r"00000001\.segment is of another format \(version 3"):
            DiskTier.open(folder, MIB)
        assert path.read_bytes() == before

    def test_a_segment_that_cannot_be_read_costs_only_itself(self, tmp_path: Path) -> None:
        folder = tmp_path / "disk"
        for i in range(3):
            with opened(folder) as tier:
                tier.write([block(i)])
        bad = BadPages(segments(folder)[1], lambda offset: True)
        with opened(folder, files=bad) as tier:
            assert [tier.lookup([make_key(i)])[0] for i in range(3)] == [Status.HIT, Status.MISS, Status.HIT]
            tier.write([block(3)])
        assert there(folder, range(4)) == [True, False, True, True], "who was told of a miss, may have discarded it"

    @pytest.mark.parametrize("where", ["header", "footer"])
    @pytest.mark.parametrize("times", [1, 10**6])
    def test_a_page_that_cannot_be_read_brings_nothing_back(self, tmp_path: Path, where: str, times: int) -> None:
        """Of a segment with tombstones: what they forgot is in another."""
        folder = tmp_path / "disk"
        with opened(folder) as tier:
            tier.write([block(i) for i in range(20)])
        with opened(folder) as tier:
            tier.discard([make_key(i) for i in range(10)])
            tier.write([block(i) for i in range(20, 25)])
        path = segments(folder)[-1]
        place = 0 if where == "header" else path.stat().st_size - PAGE
        expected = [False] * 10 + [True] * 15
        with opened(folder, files=BadPages(path, lambda offset: offset == place, times)) as tier:
            assert [tier.lookup([make_key(i)])[0] is Status.HIT for i in range(25)] == expected
        assert there(folder, range(25)) == expected

    def test_a_bad_region_costs_what_is_in_it(self, tmp_path: Path) -> None:
        """Of a segment without a footer: heads behind the region are found."""
        folder = tmp_path / "disk"
        with opened(folder) as tier:
            for i in range(20):
                tier.write([block(i)])
            copy = killed(folder, tmp_path / "copy")
        path, start, _ = place_of(copy, make_key(7))
        with opened(copy, files=BadPages(path, lambda offset: start - PAGE <= offset < start + 2 * PAGE)) as tier:
            found = [tier.lookup([make_key(i)])[0] is Status.HIT for i in range(20)]
        assert found == [i != 7 for i in range(20)]

    def test_names_like_ours_do_not_stop_it(self, tmp_path: Path) -> None:
        """Files of others that are called like segments: short ones, ones that begin with zeros, the last number."""
        folder = tmp_path / "disk"
        with opened(folder) as tier:
            tier.write([block("a")])
        others = {
            "00000002.segment": b"mine",
            "0000abcd.segment": bytes(PAGE) + b"an image" * 1000,
            "ffffffff.segment": b"mine" * PAGE,
        }
        for name, content in others.items():
            (folder / name).write_bytes(content)
        metrics = Metrics()
        with opened(folder, metrics=metrics) as tier:
            assert tier.write([block("b")]) == [WriteStatus.STORED]
        assert counted(metrics, "kvtier_foreign_files_total") == 3
        assert {name: (folder / name).read_bytes() for name in others} == others
        assert there(folder, "ab") == [True, True]

    def test_epochs_from_beyond_are_not_believed(self, tmp_path: Path) -> None:
        """Or nothing could be later than they."""
        folder = tmp_path / "disk"
        with opened(folder) as tier:
            tier.write([block("a")])
            tier._books.epoch = 2**64 - 3
            tier.write([block("b")])
        with opened(folder) as tier:
            assert tier.write([block("c")]) == [WriteStatus.STORED]
            assert tier.discard([make_key("c")]) == 1

    def test_a_forked_process_does_not_keep_the_folder(self, tmp_path: Path) -> None:
        child = -1
        try:
            with opened(tmp_path / "disk"):
                child = os.fork()
                if child == 0:
                    signal.pause()
            with opened(tmp_path / "disk") as tier:
                assert tier.write([block("a")]) == [WriteStatus.STORED]
        finally:
            if child > 0:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


class BadPages(OsFiles):
    """Reads of some pages of one file fail, so many times."""

    def __init__(self, path: Path, is_bad: Callable[[int], bool], times: int = 10**6) -> None:
        super().__init__(direct=False)
        self._inode, self._is_bad, self._left = path.stat().st_ino, is_bad, times

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        pages = range(offset, offset + sum(map(len, buffers)), PAGE)
        if self._left and os.fstat(fd).st_ino == self._inode and any(map(self._is_bad, pages)):
            self._left -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(fd, buffers, offset)


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


def test_a_packed_block_of_an_attacker_is_dropped(tmp_path: Path) -> None:
    """The checksum is right, what is packed is not."""
    key, payload = make_key("a"), make_packable_payload("a", 2 * NBYTES)
    folder = tmp_path / "disk"
    with opened(folder, codec=Codec.LZ4) as tier:
        tier.write([(key, payload)])
        killed(folder, tmp_path / "copy")
    folder = tmp_path / "copy"
    path, offset, nbytes = place_of(folder, key)
    data = bytearray(path.read_bytes())
    data[offset + 16 : offset + 20] = b"\xff" * 4  # where the first packed block begins
    header = offset - PAGE + 72
    checked = bytes(data[header : header + 88]) + bytes(data[offset : offset + nbytes])
    data[header + 88 : header + 96] = struct.pack("<Q", xxhash.xxh3_64_intdigest(checked))
    head = bytes(data[offset - PAGE : offset - PAGE + 64]) + bytes(data[header : header + 112])
    data[offset - PAGE + 64 : offset - PAGE + 72] = struct.pack("<Q", xxhash.xxh3_64_intdigest(head))
    path.write_bytes(data)
    metrics = Metrics()
    with opened(folder, metrics=metrics) as tier:
        assert tier.lookup([key]) == [Status.HIT]
        assert read_blocks(tier, [key], 2 * NBYTES) == [None]
        assert tier.write([(key, payload)]) == [WriteStatus.STORED]
    assert counted(metrics, "kvtier_corrupt_blocks_total") == 1


class TestForgetting:
    def test_outlives_a_kill_and_its_own_segment(self, tmp_path: Path) -> None:
        folder = tmp_path / "disk"
        with opened(folder, segment_bytes=64 * KIB) as tier:
            tier.write([block(i) for i in range(8)])
            assert tier.discard([make_key(i) for i in (1, 3)]) == 2
            killed(folder, tmp_path / "copy")
            for i in range(100, 160):
                tier.write([block(i)])
        expected = [i not in (1, 3) for i in range(8)]
        assert there(tmp_path / "copy", range(8)) == expected
        assert there(folder, range(8)) == expected

    def test_and_writing_again(self, tmp_path: Path) -> None:
        folder = tmp_path / "disk"
        with opened(folder) as tier:
            for _ in range(3):
                tier.write([block("a"), block("b")])
                tier.discard([make_key("a")])
            tier.write([block("a")])
            tier.discard([make_key("b")])
            killed(folder, tmp_path / "copy")
        assert there(folder, "ab") == there(tmp_path / "copy", "ab") == [True, False]

    def test_a_purge_takes_one_tenant_and_its_files(self, tmp_path: Path) -> None:
        folder = tmp_path / "disk"
        blue = [(make_key(i, tenant=BLUE), make_payload(i, NBYTES)) for i in range(30)]
        with opened(folder, segment_bytes=64 * KIB) as tier:
            tier.write(blue)
            tier.write([block(i) for i in range(30)])
            assert tier.purge(BLUE) == 30
            assert tier.purge(BLUE) == 0
            assert tier.usage_of(BLUE).used_bytes == 0
            killed(folder, tmp_path / "copy")
            assert tier.lookup([key for key, _ in blue]) == [Status.MISS] * 30
        assert {contents(path).segment.tenant for path in segments(folder)} == {TENANT}
        assert there(tmp_path / "copy", range(30)) == [True] * 30

    def test_a_purge_that_was_cut_short_is_a_purge(self, tmp_path: Path) -> None:
        """The tombstone is there, the files still are too."""
        folder = tmp_path / "disk"
        files = FaultyFiles(OsFiles(direct=False))
        with opened(folder, segment_bytes=64 * KIB, files=files) as tier:
            tier.write([block(i) for i in range(30)])
            files.fail_next("remove", errno.EIO, times=100)
            files.fail_next("truncate", errno.EIO, times=100)
            tier.purge(TENANT)
            copy = killed(folder, tmp_path / "copy")
        assert len(segments(copy)) > 2
        assert there(copy, range(30)) == [False] * 30

    def test_without_room_for_a_tombstone_takes_the_segment(self, tmp_path: Path) -> None:
        folder = tmp_path / "disk"
        files = FaultyFiles(OsFiles(direct=False))
        with opened(folder, files=files, num_threads=1) as tier:
            tier.write([block(0), block(1)])
            # The tombstone, the footer of its segment, and the header of the next one.
            files.fail_next("write", errno.EIO, times=3)
            assert tier.discard([make_key(0)]) == 1
            assert tier.lookup([make_key(0), make_key(1)]) == [Status.MISS] * 2
            copy = killed(folder, tmp_path / "copy")
        assert there(copy, [0])[0] is False

    def test_copies_that_were_moved_are_forgotten_too(self, tmp_path: Path) -> None:
        folder = tmp_path / "disk"
        with opened(folder, MIB, segment_bytes=64 * KIB) as tier:
            for i in range(300):
                tier.write([block(i)])
                read_blocks(tier, [make_key(0)], NBYTES)
            assert tier.lookup([make_key(0)]) == [Status.HIT]
            assert tier.write_amplification() > 1
            tier.discard([make_key(0)])
            copy = killed(folder, tmp_path / "copy")
        assert there(copy, [0]) == there(folder, [0]) == [False]


class TestIndex:
    @pytest.mark.parametrize("seed", [1, 2])
    def test_against_a_dict(self, seed: int) -> None:
        order, index, oracle = random.Random(seed), RecordIndex(), dict[bytes, int]()
        for step in range(600):
            keys = list({b"%d" % order.randrange(2000) for _ in range(order.randrange(60))})
            tags = tags_of(keys, seed)
            rows = index.find(tags)
            assert [bool(row >= 0) for row in rows] == [key in oracle for key in keys]
            known = rows[rows >= 0]
            assert index.records(known)["page"].tolist() == [oracle[key] for key in keys if key in oracle]
            if order.random() < 0.6:
                new = np.zeros(int((rows < 0).sum()), RECORD)
                new["tag"], new["page"] = tags[rows < 0], step
                index.insert(new)
                oracle |= {key: step for key in keys if key not in oracle}
            else:
                index.remove(known)
                for key in keys:
                    oracle.pop(key, None)
            if step % 50 == 0:
                index.check()
        assert len(index) == len(oracle)

    def test_takes_64_bytes_per_record_at_the_most(self) -> None:
        index = RecordIndex()
        rng = np.random.default_rng(0)
        for number in range(1, 400):
            records = np.zeros(500, RECORD)
            records["tag"] = rng.integers(0, 2**64, (500, 2), dtype=np.uint64)
            index.insert(records)
            assert index.nbytes <= 64 * len(index), number


def test_a_start_with_a_million_records(tmp_path: Path) -> None:
    """Footers alone, as the log would have written them over small payloads; payloads are holes."""
    folder, total, per_segment = tmp_path / "disk", 1_000_000, 15_625
    folder.mkdir()
    (folder / "kvtier-disk-tier").write_text("kvtier disk tier, format 2\n")
    template = np.frombuffer(encode_header(make_key("template"), bytes(PAGE)), HEADER_DTYPE)
    hashes = np.random.default_rng(0).integers(0, 256, (total, 32), dtype=np.uint8)
    prefix = np.frombuffer(TENANT + NAMESPACE, np.uint8)
    for number in range(1, total // per_segment + 1):
        segment = SegmentId(number, TENANT, hashlib.sha256(bytes([number])).digest()[:16])
        entries = np.zeros(per_segment, disk_format.ENTRY)
        entries["header"] = template
        keys = np.empty((per_segment, 64), np.uint8)
        keys[:, :32], keys[:, 32:] = prefix, hashes[(number - 1) * per_segment : number * per_segment]
        entries["header"]["key"] = keys.view("V64").ravel()
        entries["epoch"], entries["page"] = number, np.arange(2, per_segment + 2)
        with (folder / f"{number:08x}.segment").open("wb") as file:
            file.write(disk_format.pack_header(segment, number))
            file.truncate((per_segment + 2) * PAGE)
            file.seek(0, 2)
            file.write(disk_format.pack_footer(segment, per_segment + 2, entries))
    with opened(folder, 2**33) as tier:
        assert tier.usage().num_blocks == total
        assert tier.index_bytes() <= 64 * total
        some = [StoreKey(TENANT + NAMESPACE + hashes[i].tobytes()) for i in range(0, total, 997)]
        assert tier.lookup(some) == [Status.HIT] * len(some)
        assert tier.lookup([make_key("absent")]) == [Status.MISS]


def test_a_survey_changes_nothing_and_counts_everything(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    with opened(folder) as tier:
        tier.write([block(i) for i in range(4)])
        tier.discard([make_key(0)])
        before = {path: path.read_bytes() for path in segments(folder)}
        (segment,) = survey(folder).segments
        assert (segment.state, segment.num_live, segment.num_dead, segment.num_tombstones) == ("open", 3, 1, 1)
        assert segment.live_bytes == 3 * NBYTES
        assert segment.orphaned_bytes == 2 * PAGE
        assert {path: path.read_bytes() for path in segments(folder)} == before
    damaged = place_of(folder, make_key(2))
    flip(damaged[0], damaged[1])
    found = survey(folder, verify=True)
    assert found.corrupt == [make_key(2)]
    assert not found.is_sound
    assert survey(folder).is_sound, "nobody looked at payloads"
    assert num_blocks(folder) == 3
    assert set(found.live) == {make_key(i) for i in (1, 2, 3)}
    assert keys_of(contents(segments(folder)[0]).entries).count(make_key(0)) == 2, "record and tombstone"
