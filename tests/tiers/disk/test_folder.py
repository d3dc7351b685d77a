"""The folder of a disk tier: whose it is, what else may be in it, who may read it."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from disk_tier_rig import KIB, MIB, Open, block, reopening
from kvtier.errors import ConfigError
from kvtier.tiers.disk.medium.files import FileLayer, OsFiles
from kvtier.tiers.disk.medium.folder import MARKER
from kvtier.tiers.disk.tier import DiskTier


@pytest.fixture
def open_disk(tmp_path: Path) -> Iterator[Open]:
    with reopening(tmp_path / "disk") as open_one:
        yield open_one


class TestFolder:
    def test_with_other_content_is_refused_and_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.tex").write_text("years of work")
        with pytest.raises(ConfigError, match=r"thesis\.tex.*empty or new folder") as caught:
            DiskTier.open(tmp_path, MIB)
        assert str(tmp_path) in str(caught.value)
        assert os.listdir(tmp_path) == ["thesis.tex"]

    @pytest.mark.parametrize(("number", "words"), [(1, "a file per block.*empty the folder"), (3, "another version")])
    def test_of_another_version_is_refused(self, tmp_path: Path, number: int, words: str) -> None:
        (tmp_path / MARKER).write_text(f"kvtier disk tier, format {number}\n")
        with pytest.raises(ConfigError, match=words):
            DiskTier.open(tmp_path, MIB)

    def test_that_cannot_be_made_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigError, match="file/disk cannot be used"):
            DiskTier.open(tmp_path / "file" / "disk", MIB)

    def test_serves_one_owner(self, tmp_path: Path) -> None:
        """Another process is refused likewise: `test_disk_crash.py`."""
        tier = DiskTier.open(tmp_path / "disk", MIB)
        with pytest.raises(ConfigError, match="in use by another process") as caught:
            DiskTier.open(tmp_path / "disk", MIB)
        assert str(tmp_path / "disk") in str(caught.value)
        tier.close()
        DiskTier.open(tmp_path / "disk", MIB).close()

    def test_is_free_after_a_refused_start(self, tmp_path: Path) -> None:
        class Broken(OsFiles):
            def open(self, path: str, *, writable: bool = True) -> int:
                raise OSError(errno.EACCES, "not yours", path)

        tier = DiskTier.open(tmp_path, MIB, reserve_bytes=0)
        tier.write([block(i) for i in range(40)])
        tier.close()
        broken: FileLayer = Broken(direct=False)
        with pytest.raises(ConfigError, match="cannot be read or written"):
            DiskTier.open(tmp_path, 100 * KIB, files=broken)
        tier = DiskTier.open(tmp_path, MIB, reserve_bytes=0)
        assert tier.usage().num_blocks > 0
        tier.close()

    def test_and_its_files_are_the_users_alone(self, tmp_path: Path, open_disk: Open) -> None:
        open_disk().write([block("a")])
        assert (tmp_path / "disk").stat().st_mode & 0o777 == 0o700
        assert [path.stat().st_mode & 0o777 for path in (tmp_path / "disk").iterdir()] == [0o600] * 2
