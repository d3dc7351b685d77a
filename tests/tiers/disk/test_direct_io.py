"""Whether a disk tier goes past the page cache: as configured, and as the file system can."""

import errno
import logging
import os
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.testing.blocks import make_key, make_payload, read_blocks, summed
from kvtier.tiers.base import WriteStatus
from kvtier.tiers.disk.medium import direct_io
from kvtier.tiers.disk.medium.direct_io import DirectIo, goes_direct
from kvtier.tiers.disk.medium.files import PROBE, supports_direct
from kvtier.tiers.disk.tier import DiskTier

MIB = 2**20
NBYTES = 10_000


def test_a_start_says_once_what_it_does(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        DiskTier.open(tmp_path / "disk", MIB, reserve_bytes=0).close()
    (line,) = [record.getMessage() for record in caplog.records if "page cache" in record.getMessage()]
    assert ("cannot" not in line) == supports_direct(str(tmp_path)), line


def test_what_a_killed_start_left_behind_does_not_stop_the_next(tmp_path: Path) -> None:
    DiskTier.open(tmp_path / "disk", MIB, reserve_bytes=0).close()
    (tmp_path / "disk" / PROBE).write_bytes(b"")
    DiskTier.open(tmp_path / "disk", MIB, reserve_bytes=0).close()
    assert PROBE not in os.listdir(tmp_path / "disk")


def test_as_configured(tmp_path: Path) -> None:
    assert not goes_direct(str(tmp_path), DirectIo.OFF)
    if supports_direct(str(tmp_path)):
        assert goes_direct(str(tmp_path), DirectIo.ON)
        assert goes_direct(str(tmp_path), DirectIo.AUTO)


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
    tier.write([summed(key, payload)])
    tier.close()

    def fail(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    for wanted in choices:
        tier = DiskTier.open(tmp_path / "disk", MIB, reserve_bytes=0, direct_io=wanted)
        assert read_blocks(tier, [key], NBYTES) == [payload]
        assert tier.write([summed(make_key("b"), payload)]) == [status]
        tier.close()
