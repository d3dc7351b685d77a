"""Anonymous memory that processes share: what a map keeps, and until when."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtier.tiers import memfd

pytestmark = pytest.mark.skipif(not memfd.available(), reason="memfds are Linux's")
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
