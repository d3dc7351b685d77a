"""vLLM has an environment of its own, gigabytes of it: these tests run when they are asked for, and then never skip."""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ASKED_FOR = "KVTIER_TEST_VLLM"
collect_ignore_glob = [] if os.environ.get(ASKED_FOR) == "1" else ["test_*.py"]
"""Ignored, not skipped: where vLLM is not installed, they cannot even be imported."""
LONG = (
    "bench beside gateway images kv_events latent modes pool ranks secondary_tier server smollm soak_weights "
    "speculation states upstream weight_changes"
).split()
"""Modules with engines of several processes, large ones, or many."""

if not collect_ignore_glob:
    sys.path.insert(0, str(HERE))

    # vLLM leaves sockets and rendezvous files where temporary files go, also when it is not killed. Workers of
    # pytest-xdist have the folder of their parent; pytest's own are kept where they were.
    _litter = None
    if "PYTEST_XDIST_WORKER" not in os.environ:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        os.environ["TMPDIR"] = tempfile.tempdir = _litter = tempfile.mkdtemp(prefix="kvtier-")
        # What vLLM finds out about the class of a model, in a process of its own, which takes longer than its start.
        os.environ["VLLM_CACHE_ROOT"] = f"{_litter}/vllm"

    import tiny_llama
    from engine_lab import Lab
    from vllm_rig import CROWD_TOKENS, TOKENS, Answer, make_crowd, make_prompts

    from cache_pool import CachePool

    @pytest.fixture(scope="session")
    def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
        """A home for engines, and a model."""
        home = tmp_path_factory.mktemp("home")
        tiny_llama.make(home / "model", seed=0)
        with closing(Lab(home, home / "model")) as lab:
            yield lab

    @pytest.fixture(scope="session")
    def without_connector(lab: Lab) -> tuple[list[Answer], list[Answer]]:
        """What vLLM answers by itself to `make_prompts()`, and to the crowd, with blocks for everybody."""
        with lab.engine() as engine:
            return engine.generate(make_prompts()), engine.generate(make_crowd(), num_tokens=CROWD_TOKENS)

    @pytest.fixture(scope="session")
    def expected(without_connector: tuple[list[Answer], list[Answer]]) -> list[Answer]:
        """To `make_prompts()`."""
        return without_connector[0]

    @pytest.fixture(scope="session")
    def crowd_expected(without_connector: tuple[list[Answer], list[Answer]]) -> list[Answer]:
        return without_connector[1]

    @pytest.fixture
    def pool(tmp_path: Path) -> Iterator[CachePool]:
        """A cache pool for the tenants of `TOKENS`, with a Unix socket and a TCP port."""
        with CachePool(tmp_path, TOKENS) as running:
            yield running

    @pytest.hookimpl(tryfirst=True)
    def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> None:
        """The process that engines of all modules share is there before a module's check looks what there is."""
        if fixturedef.argname == "_module_leaves_nothing_behind":
            request.getfixturevalue("lab").keep_a_process()

    def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
        """Modules that take long come first, or one core waits for what the other began at the end."""
        items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in LONG)

    def pytest_unconfigure() -> None:
        if _litter is not None:
            shutil.rmtree(_litter, ignore_errors=True)
