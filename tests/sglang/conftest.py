"""SGLang has an environment of its own: these tests run when they are asked for, and then never skip."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ASKED_FOR = "KVTIER_TEST_SGLANG"
FAULT_ROUNDS = "KVTIER_TEST_SGLANG_FAULT_ROUNDS"
collect_ignore_glob = [] if os.environ.get(ASKED_FOR) == "1" else ["test_*.py"]
"""Ignored, not skipped: where SGLang is not installed, they cannot even be imported."""

if not collect_ignore_glob:
    sys.path.insert(0, str(HERE))

    from engine_shape import ENVIRON

    from cache_pool import TOKENS, CachePool

    os.environ.update(ENVIRON)

    @pytest.fixture(scope="module")
    def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CachePool]:
        """A cache pool for the tenants of `TOKENS`, shared by the tests of a module: their tokens differ."""
        with CachePool(tmp_path_factory.mktemp("pool"), TOKENS) as running:
            yield running

    @pytest.fixture
    def own_pool(tmp_path: Path) -> Iterator[CachePool]:
        """One that a test may kill."""
        with CachePool(tmp_path, TOKENS) as running:
            yield running

    def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
        """Moments of faults are never quite the same: `make soak` has them over and over."""
        rounds = int(os.environ.get(FAULT_ROUNDS, "1"))
        if rounds > 1 and metafunc.module.__name__.endswith("test_faults"):
            metafunc.fixturenames.append("fault_round")
            metafunc.parametrize("fault_round", range(rounds))
