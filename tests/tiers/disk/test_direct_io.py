"""Whether a disk tier goes past the page cache: as configured, as the file system can, as a measurement says."""

import errno
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from clock_rig import StillClock
from kvtier.errors import ConfigError
from kvtier.testing.blocks import make_key, make_payload, read_blocks
from kvtier.testing.faults import FaultyFiles
from kvtier.tiers.base import WriteStatus
from kvtier.tiers.disk.medium import direct_io
from kvtier.tiers.disk.medium.direct_io import DirectIo, goes_direct, measure
from kvtier.tiers.disk.medium.files import PROBE, OsFiles, supports_direct
from kvtier.tiers.disk.tier import DiskTier

MIB = 2**20
NBYTES = 10_000


class Timed(OsFiles):
    """Files whose reads take as long as the test says, and nothing else takes any time."""

    def __init__(self, clock: StillClock, seconds: float) -> None:
        super().__init__(direct=False)
        self._clock, self._seconds = clock, seconds

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset == 0:
            self._clock.now_s += self._seconds
        return super().read(fd, buffers, offset)


@pytest.mark.parametrize(
    ("direct_s", "buffered_s", "direct"), [(2, 3, True), (2, 2, True), (6, 5, True), (5, 2, False)]
)
def test_the_faster_way_is_taken_and_a_tie_is_direct(
    tmp_path: Path, direct_s: float, buffered_s: float, direct: bool
) -> None:
    clock = StillClock()
    times = measure(tmp_path / "probe", Timed(clock, direct_s / 1e3), Timed(clock, buffered_s / 1e3), clock)
    assert times is not None
    assert (times.direct_s, times.buffered_s) == pytest.approx((direct_s / 1e3, buffered_s / 1e3))
    assert times.favour_direct == direct
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("seconds", "num_reads"), [(0.05, 2), (1.0, 1)])
def test_a_slow_disk_is_not_measured_for_long(tmp_path: Path, seconds: float, num_reads: int) -> None:
    clock = StillClock()
    began_s = clock.now_s
    times = measure(tmp_path / "probe", Timed(clock, seconds), Timed(clock, seconds), clock)
    assert (times is not None) == (num_reads > 1)
    assert clock.now_s - began_s == pytest.approx(num_reads * seconds)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("op", ["create", "open", "write", "read"])
def test_a_measurement_that_fails_leaves_nothing(tmp_path: Path, op: str) -> None:
    files = FaultyFiles(OsFiles(direct=False))
    files.fail_next(op, errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        measure(tmp_path / "probe", files, files)
    assert os.listdir(tmp_path) == []


def test_a_start_says_once_what_it_does_and_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_io, "_BUDGET_S", 60.0)  # others may keep the processor from it for a while
    with caplog.at_level(logging.INFO):
        DiskTier.open(tmp_path / "disk", MIB, reserve_bytes=0).close()
    (line,) = [record.getMessage() for record in caplog.records if "page cache" in record.getMessage()]
    assert ("MiB are read in" in line) == supports_direct(str(tmp_path)), line


def test_what_a_killed_start_left_behind_does_not_stop_the_next(tmp_path: Path) -> None:
    DiskTier.open(tmp_path / "disk", MIB, reserve_bytes=0).close()
    (tmp_path / "disk" / PROBE).write_bytes(b"")
    DiskTier.open(tmp_path / "disk", MIB, reserve_bytes=0).close()
    assert PROBE not in os.listdir(tmp_path / "disk")


def test_as_configured(tmp_path: Path) -> None:
    assert not goes_direct(str(tmp_path), DirectIo.OFF)
    if supports_direct(str(tmp_path)):
        assert goes_direct(str(tmp_path), DirectIo.ON)


def test_a_file_system_that_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_io, "supports_direct", lambda directory: False)
    assert not goes_direct(str(tmp_path), DirectIo.AUTO)
    with pytest.raises(ConfigError, match="has no O_DIRECT; set direct_io to auto or off"):
        DiskTier.open(tmp_path / "disk", MIB, direct_io=DirectIo.ON)


@pytest.mark.parametrize(("code", "status"), [(errno.ENOSPC, WriteStatus.FULL), (errno.EIO, WriteStatus.FAILED)])
def test_a_disk_that_takes_nothing_is_read_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, status: WriteStatus
) -> None:
    key, payload = make_key("a"), make_payload("a", NBYTES)
    choices = list(DirectIo) if supports_direct(str(tmp_path)) else [DirectIo.AUTO, DirectIo.OFF]
    tier = DiskTier.open(tmp_path / "disk", MIB, reserve_bytes=0)
    tier.write([(key, payload)])
    tier.close()

    def fail(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    for wanted in choices:
        tier = DiskTier.open(tmp_path / "disk", MIB, reserve_bytes=0, direct_io=wanted)
        assert read_blocks(tier, [key], NBYTES) == [payload]
        assert tier.write([(make_key("b"), payload)]) == [status]
        tier.close()
