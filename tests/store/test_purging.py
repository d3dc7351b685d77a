"""Purges that cannot do all they should say so, leave others alone, and are finished by the next one."""

import errno
import itertools
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gated_files import GatedFiles
from kvtier.store import purging
from kvtier.store.purging import PurgeReport
from kvtier.testing.blocks import make_key
from kvtier.tiers.base import Status, WriteStatus
from kvtier.tiers.disk.medium.files import OsFiles
from pool_rig import BLUE, RED, WAIT_S, CoreRig, core_rig, until

NUM_BLOCKS = 20
AGES_S = 3600.0


class FullFiles(OsFiles):
    """Takes no bytes while it is `full`."""

    full = False

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(fd, buffers, offset)


class ReadOnlyFiles(OsFiles):
    """Lets nothing be changed while it is `read_only`, as a file system that was mounted so after errors."""

    read_only = False

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        self._refuse()
        super().write(fd, buffers, offset)

    def create(self, path: str, nbytes: int) -> int:
        self._refuse()
        return super().create(path, nbytes)

    def truncate(self, fd: int, nbytes: int) -> None:
        self._refuse()
        super().truncate(fd, nbytes)

    def remove(self, path: str) -> None:
        self._refuse()
        super().remove(path)

    def _refuse(self) -> None:
        if self.read_only:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def fill(rig: CoreRig) -> None:
    """Blocks of both tenants, in memory and on disk."""
    for tenant in (RED, BLUE):
        assert {rig.store(label, tenant=tenant) for label in range(NUM_BLOCKS)} == {WriteStatus.STORED}
    disk = rig.core.usage(RED)[1:]
    until(lambda: not disk or all(rig.core.usage(each)[1].num_blocks == NUM_BLOCKS for each in (RED, BLUE)))


def there(rig: CoreRig, tenant: object) -> int:
    return rig.core.lookup([make_key(label, tenant=tenant) for label in range(NUM_BLOCKS)]).count(Status.HIT)


@pytest.mark.parametrize("seconds", [-AGES_S, 0.0])
def test_a_purge_whose_time_is_over_does_not_say_that_nothing_is_left(tmp_path: Path, seconds: float) -> None:
    """As after a clock that went ahead: what one look has removed may have come again, and nobody has looked."""
    with core_rig(tmp_path / "disk") as rig:
        fill(rig)
        report = rig.core.purge(RED, seconds)
        assert any("time was over" in problem for problem in report.problems)
        report = rig.core.purge(RED, AGES_S)
        assert (set(report.removed.values()), report.problems) == ({0}, [])
        assert (there(rig, RED), there(rig, BLUE)) == (0, NUM_BLOCKS)


def test_a_purge_of_a_disk_that_hangs_says_so_and_the_next_one_finishes(tmp_path: Path) -> None:
    with core_rig(tmp_path / "disk") as rig:
        fill(rig)
        rig.core.hurry(0.2)
        rig.files.may_write.clear()
        report = rig.core.purge(RED, AGES_S)
        assert any("hangs" in problem for problem in report.problems)
        assert there(rig, RED) == 0
        rig.files.may_write.set()
        until(lambda: not rig.core.degraded())
        assert rig.core.purge(RED, AGES_S).problems == []
        assert (there(rig, RED), there(rig, BLUE)) == (0, NUM_BLOCKS)


def test_a_purge_of_a_tenant_that_still_writes_says_so_and_is_over_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it would wait for readers of what it has removed."""
    monkeypatch.setattr(purging, "_PATIENCE_S", AGES_S)
    with core_rig(tmp_path / "disk") as rig:
        fill(rig)
        reports = list[PurgeReport]()
        sweep, num_late = purging._sweep, itertools.count()

        def sweep_too_early(*args: Any) -> int:
            num_found = sweep(*args)
            rig.store(("late", next(num_late)), tenant=RED)
            return num_found

        monkeypatch.setattr(purging, "_sweep", sweep_too_early)
        asked = threading.Thread(target=lambda: reports.append(rig.core.purge(RED, AGES_S)), daemon=True)
        asked.start()
        asked.join(WAIT_S)
        assert reports, "it waits"
        assert reports[0].problems[-1].endswith("the tenant still writes")
        assert (there(rig, RED), there(rig, BLUE)) == (0, NUM_BLOCKS)
        monkeypatch.setattr(purging, "_sweep", sweep)
        assert rig.core.purge(RED, AGES_S).problems == []


def test_a_full_disk_is_purged(tmp_path: Path) -> None:
    files = FullFiles(direct=False)
    with core_rig(tmp_path / "disk", files=GatedFiles(files)) as rig:
        fill(rig)
        files.full = True
        rig.core.purge(RED, AGES_S)
        assert (there(rig, RED), there(rig, BLUE)) == (0, NUM_BLOCKS)
        files.full = False
    with core_rig(tmp_path / "disk") as rig:
        assert (there(rig, RED), there(rig, BLUE)) == (0, NUM_BLOCKS), "nor after a start"


def test_a_purge_of_a_disk_that_is_read_only_says_so_and_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be removed is there: after a start it would even be found."""
    monkeypatch.setattr("kvtier.store.lower_tiers._REMOVAL_S", 0.1)
    monkeypatch.setattr("kvtier.tiers.disk.state.segment_set._STUCK_S", 0.1)
    files = ReadOnlyFiles(direct=False)
    with core_rig(tmp_path / "disk", files=GatedFiles(files)) as rig:
        fill(rig)
        files.read_only = True
        report = rig.core.purge(RED, AGES_S)
        assert any(problem.startswith("disk") for problem in report.problems), report
        assert (there(rig, RED), there(rig, BLUE)) == (0, NUM_BLOCKS)
        assert rig.core.purge(RED, AGES_S).problems, "it is no better for being asked again"
        files.read_only = False
        until(lambda: rig.core.purge(RED, AGES_S).problems == [])
        assert (there(rig, RED), there(rig, BLUE)) == (0, NUM_BLOCKS)
    with core_rig(tmp_path / "disk") as rig:
        assert (there(rig, RED), there(rig, BLUE)) == (0, NUM_BLOCKS), "nor after a start"
