"""vLLM's own connector tests, out of its source distribution: fetched once, and nothing of it is in this repository."""

import fcntl
import importlib.util
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from types import ModuleType

import vllm

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools" / "environments"))

from vllm_sources import download  # noqa: E402

VERSION: str = vllm.__version__
UNIT = PurePosixPath("tests/v1/kv_connector/unit")
"""The tests that are wanted, inside the distribution."""
_HELPERS = ("tests/v1/core/utils.py",)
"""What they import beside themselves."""
FOLDER = ROOT / ".venv" / "vllm-sdist"
VLLM_CACHE = FOLDER / "cache"
"""For `VLLM_CACHE_ROOT`: vLLM looks at the class of a model in a process of its own, once, for 10 seconds."""


def fetch(folder: Path = FOLDER) -> Path:
    """The folder from which `tests.v1.kv_connector.unit` can be imported. Asks the package index the first time only.

    Raises `FetchError`.
    """
    target = folder / VERSION
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock, tempfile.TemporaryDirectory(dir=folder) as scratch:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes
        if target.exists():
            return target
        fresh = Path(scratch) / "fresh"
        with tarfile.open(download(VERSION, Path(scratch), python=sys.executable)) as archive:
            for member, path in _wanted(archive):
                member.name = str(path)
                archive.extract(member, fresh, filter="data")
        fresh.replace(target)  # whole or not at all
    return target


def load_helpers() -> ModuleType:
    """`utils.py` of vLLM's connector tests. Not by the name it has there: `tests` is also a folder of ours."""
    name = "vllm_unit_test_helpers"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, fetch() / UNIT / "utils.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def unit_tests(root: Path) -> list[str]:
    """Names of all test files there, relative to `UNIT`."""
    unit = root / UNIT
    return sorted(path.relative_to(unit).as_posix() for path in unit.rglob("test_*.py"))


def copy_to(root: Path, into: Path) -> Path:
    """A copy to run in: tests write beside themselves."""
    return Path(shutil.copytree(root, into))


def _wanted(archive: tarfile.TarFile) -> Iterator[tuple[tarfile.TarInfo, PurePosixPath]]:
    """Members and their paths without the distribution's own folder."""
    packages = {str(parent / "__init__.py") for parent in (UNIT / "x").parents}
    packages |= {str(parent / "__init__.py") for name in _HELPERS for parent in PurePosixPath(name).parents}
    for member in archive:
        path = PurePosixPath(*PurePosixPath(member.name).parts[1:])
        if member.isfile() and (path.is_relative_to(UNIT) or str(path) in packages or str(path) in _HELPERS):
            yield member, path
