"""What a start of the disk tier finds: after an end or a kill, with less room, beside files of others, many records."""

import hashlib
import os
import shutil
import signal
import struct
from pathlib import Path

import numpy as np
import pytest
import xxhash

from disk_log_rig import KIB, MIB, NBYTES, BadPages, block, counted, there
from disk_rig import contents, killed, opened, overwrite, place_of, segments, used_bytes
from kvtier.codec.stored_form import HEADER_DTYPE, encode_header
from kvtier.errors import ConfigError
from kvtier.identity.keys import StoreKey
from kvtier.metrics import Metrics
from kvtier.testing.blocks import NAMESPACE, TENANT, make_key
from kvtier.tiers.base import Status, WriteStatus
from kvtier.tiers.disk.log import format as disk_format
from kvtier.tiers.disk.log.format import PAGE, SegmentId
from kvtier.tiers.disk.tier import DiskTier


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

    def test_a_file_that_somebody_puts_where_a_segment_is_to_be_is_not_replaced(self, tmp_path: Path) -> None:
        folder = tmp_path / "disk"
        with opened(folder, MIB, segment_bytes=64 * KIB) as tier:
            tier.write([block("a")])
            foreign = [folder / f"{number:08x}.segment" for number in range(1, 10)]
            foreign = [path for path in foreign if not path.exists()]
            for path in foreign:
                path.write_bytes(b"mine")
            for i in range(12):
                assert tier.write([block(i)]) == [WriteStatus.STORED]
            assert [path.read_bytes() for path in foreign] == [b"mine"] * len(foreign)
        assert there(folder, range(12)) == [True] * 12

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
        """The page belongs to a segment with tombstones; the blocks that they forgot are in another segment."""
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
        """The segment has no footer, and heads behind the bad region are found."""
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
            tier._parts.state.epoch = 2**64 - 3
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
        assert tier._parts.state.index.nbytes <= 64 * total
        some = [StoreKey(TENANT + NAMESPACE + hashes[i].tobytes()) for i in range(0, total, 997)]
        assert tier.lookup(some) == [Status.HIT] * len(some)
        assert tier.lookup([make_key("absent")]) == [Status.MISS]
