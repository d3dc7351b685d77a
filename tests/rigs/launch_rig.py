"""What a launcher would launch on a GPU, for tests: see `kvtier_bench.gpu.resources.compiling`."""

import contextlib
import os
from collections.abc import Iterator

import pytest
import triton

from kvtier_bench.gpu.resources.compiling import SHARED_LIMIT_BYTES, Launch, Usage, compile_launch, recorded, usage_of

__all__ = ["SHARED_LIMIT_BYTES", "Launch", "Usage", "compile_launch", "recorded", "triton_cache", "usage_of"]


@contextlib.contextmanager
def triton_cache(folders: pytest.TempPathFactory) -> Iterator[None]:
    """One of this run of the tests, and of all its processes: none compiles what another one has."""
    base = folders.getbasetemp()
    run = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(run / "triton")
        yield
