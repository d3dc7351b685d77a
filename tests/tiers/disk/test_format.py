"""How the log looks on disk: bytes that are what they were, and nothing that looks like them."""

import shutil
from pathlib import Path

import numpy as np

from disk_log_rig import block
from disk_rig import flip, killed, opened, segments
from kvtier.codec.stored_form import HEADER_DTYPE, encode_header, parse_stored_header, well_formed
from kvtier.errors import CorruptBlockError
from kvtier.testing.blocks import TENANT, make_key, make_packable_payload, read_blocks, summed
from kvtier.tiers.base import Status
from kvtier.tiers.disk.log import format as disk_format
from kvtier.tiers.disk.log.format import PAGE, Kind, SegmentId

GOLDEN = Path(__file__).parents[2] / "golden"


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
        """A writer of blocks knows everything of the format but the nonce."""
        fake = disk_format.make_entries([encode_header(make_key("victim"), b"evil")], [9], [5], [Kind.RECORD])
        with opened(tmp_path / "disk") as tier:
            head = disk_format.pack_extent_head(SegmentId(1, TENANT, bytes(16)), 4, 2, fake)
            tier.write([summed(make_key("trap"), head + b"evil".ljust(PAGE, b"\0"))])
            tier.write([block("after")])
            killed(tmp_path / "disk", tmp_path / "copy")
        path = segments(tmp_path / "copy")[0]
        flip(path, PAGE + 100)  # the head of the trap's extent: the scan looks for the next one
        with opened(tmp_path / "copy") as tier:
            assert tier.lookup([make_key("victim"), make_key("after")]) == [Status.MISS, Status.HIT]
