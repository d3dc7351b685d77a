"""vLLM's own connector tests, out of its source distribution: fetched once, and nothing of it is in this repository."""

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from types import ModuleType

VERSION = "0.32.0"
UNIT = PurePosixPath("tests/v1/kv_connector/unit")
"""The tests that are wanted, inside the distribution."""
_HELPERS = ("tests/v1/core/utils.py",)
"""What they import beside themselves."""
_BUILD_TOOLS = ("setuptools>=77.0.3,<81", "setuptools-scm>=8", "setuptools-rust>=1.9", "packaging>=24.2", "wheel")
"""What its build asks for beside torch, as far as metadata needs it."""
FOLDER = Path(__file__).resolve().parents[3] / ".venv" / "vllm-sdist"
VLLM_CACHE = FOLDER / "cache"
"""For `VLLM_CACHE_ROOT`: vLLM looks at the class of a model in a process of its own, once, for 10 seconds."""


class FetchError(Exception):
    """The source distribution cannot be had: see pip's own words, and whether there is a package index."""


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
        with tarfile.open(_download(Path(scratch))) as archive:
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


def _download(scratch: Path) -> Path:
    """pip hands out a source distribution only once it has asked its build for the metadata.

    That runs with the torch that is installed here: left alone, pip would get another one for it, gigabytes with CUDA.
    """
    tools = scratch / "tools"
    _pip("install", f"--target={tools}", *_BUILD_TOOLS)
    # Told so, the build asks neither git for the version nor for a compiler.
    told = {"VLLM_VERSION_OVERRIDE": VERSION, "VLLM_TARGET_DEVICE": "empty", "PYTHONPATH": str(tools)}
    source = ["--no-deps", "--no-binary=vllm", "--no-build-isolation"]
    _pip("download", *source, f"--dest={scratch}", f"vllm=={VERSION}", **told)
    (archive,) = scratch.glob("*.tar.gz")
    return archive


def _pip(command: str, *arguments: str, **environ: str) -> None:
    whole = [sys.executable, "-m", "pip", command, "--quiet", "--disable-pip-version-check", *arguments]
    ended = subprocess.run(whole, env=os.environ | environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if ended.returncode:
        raise FetchError(f"pip {command} {' '.join(arguments)} failed: {ended.stdout[-2000:]}")


def _wanted(archive: tarfile.TarFile) -> Iterator[tuple[tarfile.TarInfo, PurePosixPath]]:
    """Members and their paths without the distribution's own folder."""
    packages = {str(parent / "__init__.py") for parent in (UNIT / "x").parents}
    packages |= {str(parent / "__init__.py") for name in _HELPERS for parent in PurePosixPath(name).parents}
    for member in archive:
        path = PurePosixPath(*PurePosixPath(member.name).parts[1:])
        if member.isfile() and (path.is_relative_to(UNIT) or str(path) in packages or str(path) in _HELPERS):
            yield member, path
