"""A disk tier whose process is killed at any moment: what was acknowledged is there, what was forgotten stays away."""

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from disk_crash_rig import run_clients_rounds, run_rounds
from kvtier.errors import ConfigError
from kvtier.tiers.disk.tier import DiskTier

CHILD = Path(__file__).parents[2] / "rigs" / "disk_crash_child.py"


def test_nothing_wrong_is_left_by_a_kill(tmp_path: Path) -> None:
    """`make chaos` runs twenty times as many rounds."""
    run_rounds(tmp_path / "disk", random.SystemRandom().randrange(2**32), 10)


def test_nothing_wrong_is_left_by_a_kill_of_several_clients(tmp_path: Path) -> None:
    """`make chaos` runs more rounds of this test, too."""
    run_clients_rounds(tmp_path / "disk", random.SystemRandom().randrange(2**32), 10)


@pytest.fixture
def child(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process that owns the folder."""
    command = [sys.executable, str(CHILD), str(tmp_path / "disk"), "1", "1", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_one_folder_serves_one_process(tmp_path: Path, child: "subprocess.Popen[str]") -> None:
    assert child.stdout is not None
    assert [child.stdout.readline() for _ in range(2)][-1] == '["open"]\n'
    with pytest.raises(ConfigError, match="in use by another process") as caught:
        DiskTier.open(tmp_path / "disk", 1 << 20)
    assert str(tmp_path / "disk") in str(caught.value)
    child.kill()
    child.wait(20)
    DiskTier.open(tmp_path / "disk", 1 << 20).close()
