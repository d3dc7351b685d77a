"""Memory that processes share: what a map keeps, and until when. How memory of either kind is touched first."""

import ctypes
import errno
import gc
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtier.errors import ConfigError
from kvtier.memory import memfd, numa
from kvtier.memory import pages as memory
from kvtier.memory.arena import Arena

NAME, NBYTES = "kvtier-test-maps", 1 << 20


@pytest.fixture
def descriptor() -> Iterator[int]:
    descriptor = memfd.create(NAME, NBYTES)
    yield descriptor
    os.close(descriptor)


def num_maps() -> int:
    return sum(NAME in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_a_map_keeps_no_descriptor_and_goes_with_its_last_view(descriptor: int) -> None:
    """A pool has thousands of slabs, and an engine a thousand descriptors."""
    num_open = len(os.listdir("/proc/self/fd"))
    views = [memfd.map_descriptor(descriptor, NBYTES, writable=writable) for writable in (True, False)]
    assert len(os.listdir("/proc/self/fd")) == num_open
    assert num_maps() == 2
    assert [view.readonly for view in views] == [False, True]
    views[0][7] = 1
    part = np.frombuffer(views[1], dtype=np.uint8)[6:9]
    views.clear()
    gc.collect()
    assert num_maps() == 1
    assert part.tolist() == [0, 1, 0]
    del part
    assert num_maps() == 0


def test_what_cannot_be_mapped_is_an_error(descriptor: int) -> None:
    read_only = memfd.reopen_read_only(descriptor)
    with pytest.raises(PermissionError):
        memfd.map_descriptor(read_only, NBYTES, writable=True)
    os.close(read_only)
    with pytest.raises(OSError, match="Bad file descriptor"):
        memfd.map_descriptor(-1, NBYTES, writable=False)
    assert num_maps() == 0


def num_present(view: memoryview) -> int:
    """How many of its pages this process has: bit 63 of each page's word in `/proc/self/pagemap`."""
    pages = np.frombuffer(view, dtype=np.uint8)
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
        pagemap.seek(pages.ctypes.data // memory.PAGE_BYTES * 8)
        words = pagemap.read(pages.size // memory.PAGE_BYTES * 8)
    return int((np.frombuffer(words, dtype=np.uint64) >> np.uint64(63)).sum())


class Libc:
    """A libc whose `madvise` fails; all else is the real one's."""

    def __init__(self, code: int) -> None:
        self._code = code

    def madvise(self, *_arguments: object) -> int:
        ctypes.set_errno(self._code)
        return -1


def failing_madvise(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    class Ctypes:
        CDLL = staticmethod(lambda *_, **__: Libc(code))

        def __getattr__(self, name: str) -> object:
            return getattr(ctypes, name)

    monkeypatch.setattr(memory, "ctypes", Ctypes())


@pytest.mark.parametrize("is_shared", [False, True], ids=["anonymous", "memfd"])
@pytest.mark.parametrize("knows_populate", [True, False])
@pytest.mark.parametrize("nbytes", [memory.PAGE_BYTES * 2000, 5 * (4 << 20) + memory.PAGE_BYTES])
def test_every_page_is_touched(
    is_shared: bool, knows_populate: bool, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_TOUCH_BYTES", 4 << 20)
    if not knows_populate:
        failing_madvise(monkeypatch, errno.EINVAL)
    descriptor = memfd.create(NAME, nbytes)
    view = memfd.map_new(descriptor, nbytes, prefault=False) if is_shared else memory.map_memory(nbytes, prefault=False)
    assert num_present(view) == 0
    memory.touch_pages(view)
    assert num_present(view) == nbytes // memory.PAGE_BYTES
    assert not np.frombuffer(view, dtype=np.uint8).any()
    os.close(descriptor)


def test_memory_that_the_system_does_not_have_is_an_error_of_the_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failing_madvise(monkeypatch, errno.ENOMEM)
    with pytest.raises(ConfigError, match=r"Cannot allocate memory; lower host\.capacity_bytes"):
        Arena(4, 1 << 20, shared=True)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="mbind(2) has another number there")
@pytest.mark.parametrize(("node", "word", "bit"), [(1, 0, 1), (70, 1, 6)])
def test_memory_comes_from_the_devices_node(node: int, word: int, bit: int) -> None:
    calls: list[tuple[object, ...]] = []
    view = memory.map_memory(memory.PAGE_BYTES, prefault=False)
    numa.prefer_node(view, node, syscall=lambda *arguments: calls.append(arguments) or 0)
    ((number, address, nbytes, mode, mask, max_node, flags),) = calls
    assert number.value == {"x86_64": 237, "aarch64": 235}[platform.machine()]
    assert address.value == np.frombuffer(view, dtype=np.uint8).ctypes.data
    assert (nbytes.value, mode.value, max_node.value, flags.value) == (memory.PAGE_BYTES, 1, 1025, 0)
    assert list(mask) == [1 << bit if i == word else 0 for i in range(16)]


def test_the_kernel_takes_these_arguments(caplog: pytest.LogCaptureFixture) -> None:
    view = memory.map_memory(memory.PAGE_BYTES, prefault=False)
    numa.prefer_node(view, 0)
    if "not permitted" in caplog.text:
        pytest.skip("a container without CAP_SYS_NICE")
    assert not caplog.records
    numa.prefer_node(view, 999)
    assert "not bound to NUMA node 999" in caplog.text


def test_an_arena_is_bound_before_it_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    monkeypatch.setattr("kvtier.memory.arena.prefer_node", lambda _memory, node: steps.append(f"node {node}"))
    monkeypatch.setattr("kvtier.memory.arena.touch_pages", lambda _memory: steps.append("touch"))
    for numa_node in (1, None):
        Arena(2, 4096, shared=True, numa_node=numa_node).close()
    assert steps == ["node 1", "touch", "touch"]


def _pci(sys: Path, *, online: str, node: str) -> None:
    for path, text in (
        ("devices/system/node/online", online),
        ("bus/pci/devices/0001:9b:00.0/numa_node", node),
    ):
        (sys / path).parent.mkdir(parents=True)
        (sys / path).write_text(f"{text}\n")


@pytest.mark.parametrize(
    ("online", "node", "expected"), [("0-1", "1", 1), ("0-1", "0", 0), ("0", "0", None), ("0-1", "-1", None)]
)
def test_the_node_of_a_device(online: str, node: str, expected: int | None, tmp_path: Path) -> None:
    _pci(tmp_path, online=online, node=node)
    assert numa.node_of_pci(1, 0x9B, 0, sys=tmp_path) == expected
    assert numa.node_of_pci(1, 0x9C, 0, sys=tmp_path) is None
