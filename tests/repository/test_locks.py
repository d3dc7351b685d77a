"""The lock files of the pool's image: whole, in agreement with pyproject.toml, from no index in particular."""

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LOCKS = {path.stem: path for path in (ROOT / "deploy" / "locks").iterdir()}
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
BASE: list[str] = PYPROJECT["project"]["dependencies"]
SEAL: list[str] = PYPROJECT["project"]["optional-dependencies"]["seal"]
GATEWAY: list[str] = PYPROJECT["project"]["optional-dependencies"]["gateway"]
NEEDED = {
    "pool": BASE,
    "pool-seal": BASE + SEAL,
    "pool-gateway": BASE + GATEWAY,
    "build": PYPROJECT["build-system"]["requires"],
}
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")
IMAGE = {"python_full_version": "3.11.2", "python_version": "3.11", "sys_platform": "linux"}
"""The oldest Python that the image's base may have."""


def entries(name: str) -> list[tuple[Requirement, list[str]]]:
    """Each package of a lock file, with the hashes of its files."""
    text = re.sub(r"\s+#.*", "", LOCKS[name].read_text().replace("\\\n", ""), flags=re.MULTILINE)
    lines = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    return [
        (Requirement(" ".join(w for w in words if not w.startswith("--"))), [w for w in words if w.startswith("--")])
        for words in lines
    ]


def pinned(name: str) -> dict[str, str]:
    """Versions by name, as pip installs them in the image."""
    there = [found for found, _ in entries(name) if found.marker is None or found.marker.evaluate(IMAGE)]
    versions = {canonicalize_name(found.name): str(found.specifier).removeprefix("==") for found in there}
    assert len(versions) == len(there), "a package is pinned twice"
    return versions


def test_each_extra_of_the_image_has_its_file() -> None:
    assert set(LOCKS) == set(NEEDED)


@pytest.mark.parametrize("name", NEEDED)
def test_every_package_is_pinned_with_the_hashes_of_its_files(name: str) -> None:
    found = entries(name)
    assert len(found) >= len(NEEDED[name])
    for requirement, hashes in found:
        assert re.fullmatch(r"==[\w.!+]+", str(requirement.specifier)), f"{requirement} is not pinned: make lock"
        assert hashes, f"{requirement} has no hashes: make lock"
        assert all(map(HASH.fullmatch, hashes)), f"{requirement}: {hashes}"


@pytest.mark.parametrize("name", NEEDED)
def test_what_pyproject_asks_for_is_in_its_lock_file(name: str) -> None:
    versions = pinned(name)
    for wanted in map(Requirement, NEEDED[name]):
        version = versions.get(canonicalize_name(wanted.name))
        assert version is not None, f"{wanted} is not in {LOCKS[name]}: make lock"
        assert wanted.specifier.contains(version), f"{wanted}, and {LOCKS[name]} has {version}: make lock"


def test_extras_change_nothing_else() -> None:
    base, sealing, gateway = pinned("pool"), pinned("pool-seal"), pinned("pool-gateway")
    for extended in (sealing, gateway):
        assert base == {name: extended[name] for name in base}
    assert "cryptography" in sealing.keys() - base.keys()
    assert "aiohttp" in gateway.keys() - base.keys()


@pytest.mark.parametrize("name", NEEDED)
def test_no_index_is_named(name: str) -> None:
    """Each builder has an index of their own; hashes hold wherever the files come from."""
    text = LOCKS[name].read_text()
    assert not re.findall(r"//|\bindex-url\b|\bfind-links\b|\btrusted-host\b|@|\b[\w-]+\.(?:org|com|net|io)\b", text)


def installations() -> Sequence[str]:
    """The calls of `pip install` and `pip wheel` in the image's recipe, continuation lines joined."""
    recipe = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    steps = [step for line in recipe.splitlines() if line.startswith("RUN ") for step in line.split("&&")]
    return [step for step in steps if re.search(r"\bpip\b.*\b(install|wheel)\b", step)]


def test_the_image_takes_nothing_from_an_index_without_a_hash() -> None:
    calls = installations()
    assert len(calls) >= 4
    for call in calls:
        assert "--require-hashes" in call or "--no-index" in call, call
        assert "--require-hashes" not in call or "/build/locks/" in call, call
