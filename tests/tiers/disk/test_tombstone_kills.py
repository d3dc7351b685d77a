"""A kill while a disk tier forgets: nothing that was forgotten by then comes back."""

import errno
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from disk_forgetting_rig import SMALL, WAIT_S, Forget, Held, discard, found, items, purge
from disk_log_rig import MIB
from disk_rig import damage, killed, opened, overwrite, place_of
from kvtier.testing.blocks import TENANT, make_key, read_blocks
from kvtier.testing.faults import FaultyFiles
from kvtier.tiers.base import WriteStatus
from kvtier.tiers.disk.medium.files import OsFiles


class TestAKill:
    """What a copy of the folder holds, taken at the moment."""

    def test_while_blocks_that_were_discarded_are_evicted(self, tmp_path: Path) -> None:
        """The index no longer has them, and their file is still there."""
        files = Held("cut")
        with opened(tmp_path / "disk", MIB, files=files) as tier, ThreadPoolExecutor(1) as executor:
            tier.write(items(range(8)))
            files.armed = True
            filling = executor.submit(lambda: [tier.write(items([("fill", i)], 20_000)) for i in range(100)])
            files.wait_until_reached()
            assert found(tier, range(8)) == 0
            tier.discard([make_key(i) for i in range(8)])
            copy = killed(tmp_path / "disk", tmp_path / "copy")
            files.go_on.set()
            filling.result(WAIT_S)
        with opened(copy, MIB) as tier:
            assert found(tier, range(8)) == 0

    @pytest.mark.parametrize("forget", [discard, purge])
    def test_after_the_first_write_of_a_tenant_landed_that_was_forgotten_meanwhile(
        self, tmp_path: Path, forget: Forget
    ) -> None:
        files = Held("write", after=True)
        with opened(tmp_path / "disk", files=files) as tier, ThreadPoolExecutor(1) as executor:
            files.armed = True
            writing = executor.submit(tier.write, items("a"))
            files.wait_until_reached()
            forget(tier, [make_key("a")])
            copy = killed(tmp_path / "disk", tmp_path / "copy")
            files.go_on.set()
            writing.result(WAIT_S)
            assert found(tier, "a") == 0
        with opened(copy) as tier:
            assert found(tier, "a") == 0
        with opened(tmp_path / "disk") as tier:
            assert found(tier, "a") == 0

    @pytest.mark.parametrize("forget", [discard, purge, "drop"])
    def test_while_somebody_else_forgets_the_same_block(self, tmp_path: Path, forget: Forget | str) -> None:
        """The one who took it out of the index is still writing that down; the other must not rely on it."""
        files = Held("write")
        with opened(tmp_path / "disk", files=files) as tier, ThreadPoolExecutor(1) as executor:
            tier.write(items(range(3)))
            if forget == "drop":
                path, offset, nbytes = place_of(tmp_path / "disk", make_key(1))
                sound = path.read_bytes()[offset : offset + nbytes]
                damage(tmp_path / "disk", make_key(1))
            files.armed = True
            if callable(forget):
                forgetting_it = executor.submit(forget, tier, [make_key(1)])
            else:
                forgetting_it = executor.submit(read_blocks, tier, [make_key(1)], SMALL)
            files.wait_until_reached()
            if forget == "drop":
                overwrite(path, offset, sound)  # it was the read that failed
            assert tier.discard([make_key(1)]) == 0
            copy = killed(tmp_path / "disk", tmp_path / "copy")
            files.go_on.set()
            forgetting_it.result(WAIT_S)
        with opened(copy) as tier:
            assert found(tier, [1]) == 0

    def test_after_a_purge_that_came_before_the_first_segment(self, tmp_path: Path) -> None:
        class Slow(OsFiles):
            made, landed = threading.Event(), threading.Event()
            make, go_on = threading.Event(), threading.Event()

            def create(self, path: str, nbytes: int) -> int:
                self.made.set()
                assert self.make.wait(WAIT_S)
                return super().create(path, nbytes)

            def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
                super().write(fd, buffers, offset)
                if offset and sum(map(len, buffers)) > SMALL and not self.landed.is_set():
                    self.landed.set()
                    assert self.go_on.wait(WAIT_S)

        files = Slow(direct=False)
        with opened(tmp_path / "disk", files=files) as tier, ThreadPoolExecutor(2) as executor:
            writing = executor.submit(tier.write, items("a"))
            assert files.made.wait(WAIT_S)
            purging = executor.submit(tier.purge, TENANT)
            while not tier._parts.state.purged:
                assert not purging.done()
            files.make.set()
            assert files.landed.wait(WAIT_S)
            assert purging.result(WAIT_S) == 0
            copy = killed(tmp_path / "disk", tmp_path / "copy")
            files.go_on.set()
            writing.result(WAIT_S)
            assert found(tier, "a") == 0
        with opened(copy) as tier:
            assert found(tier, "a") == 0

    def test_after_a_write_failed_that_had_landed(self, tmp_path: Path) -> None:
        """Half of an extent is there, and its block was discarded, not knowing."""
        files = FaultyFiles(OsFiles(direct=False))
        with opened(tmp_path / "disk", files=files, segment_bytes=MIB) as tier, ThreadPoolExecutor(1) as executor:
            held = Held("write")
            files._inner = held
            held.armed = True
            writing = executor.submit(tier.write, items(["other"]))  # so that the segment is not sealed at once
            held.wait_until_reached()
            files.fail_next("write", errno.EIO)
            assert set(tier.write(items(range(6)))) == {WriteStatus.FAILED}
            tier.discard([make_key(i) for i in range(6)])
            copy = killed(tmp_path / "disk", tmp_path / "copy")
            held.go_on.set()
            writing.result(WAIT_S)
        with opened(copy) as tier:
            assert found(tier, range(6)) == 0
