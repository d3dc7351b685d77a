"""Segments of a disk tier that are lost: removed by somebody, or in a bad region of the drive."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from disk_forgetting_rig import SMALL, items
from disk_log_rig import MIB
from disk_rig import opened, segments
from kvtier.testing.blocks import make_key, make_payload, read_blocks
from kvtier.tiers.base import WriteStatus
from kvtier.tiers.files import OsFiles


class TestLostSegments:
    def test_one_that_somebody_removed_is_missed_alone(self, tmp_path: Path) -> None:
        with opened(tmp_path / "disk", segment_bytes=MIB) as tier:
            for i in range(4):
                tier.write(items([(i, j) for j in range(40)]))
                tier._log.retire_all()
            tier._files.descriptors.forget(1)
            segments(tmp_path / "disk")[0].unlink()
            labels = [(i, j) for i in range(4) for j in range(40)]
            blocks = read_blocks(tier, [make_key(label) for label in labels], SMALL)
            assert [block is not None for block in blocks] == [i > 0 for i, _ in labels]
            assert tier.write(items(["new"])) == [WriteStatus.STORED]

    def test_a_bad_region_does_not_switch_the_tier_off(self, tmp_path: Path) -> None:
        class Bad(OsFiles):
            end = 0

            def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
                if offset < self.end:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                return super().read(fd, buffers, offset)

        files = Bad(direct=False)
        with opened(tmp_path / "disk", files=files, segment_bytes=MIB, capacity_bytes=32 * MIB) as tier:
            tier.write(items(range(100)))
            files.end = MIB // 2
            tier.write(items([("fill", i) for i in range(40)]))
            tier.write(items(["other"]))
            assert read_blocks(tier, [make_key(i) for i in range(100)], SMALL) == [None] * 100
            assert read_blocks(tier, [make_key("other")], SMALL) == [make_payload("other", SMALL)]
