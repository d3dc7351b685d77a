"""Wheels for a machine with a GPU and no package index: which ones, unpacked, and the commands of the checkout."""

import importlib.util
import zipfile
from importlib.metadata import distribution, distributions
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def wheels() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_wheels", ROOT / "tools" / "gpu_wheels.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_wheels_are_what_pyproject_says(wheels: ModuleType, tmp_path: Path) -> None:
    wanted = wheels.requirements(ROOT / "pyproject.toml")
    names = {requirement.split(">")[0].split("[")[0] for requirement in wanted}
    assert {"pydantic", "redis", "blosc", "xxhash", "tokenizers", "pytest"} <= names
    assert not names & {"numpy", "torch", "triton"}
    asked = wheels.download_command(tmp_path, ["redis"])
    assert asked[asked.index("--python-version") + 1] == "3.12"
    assert "--only-binary=:all:" in asked


def test_without_wheels_the_rest_is_done(
    wheels: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(wheels, "TOOLS", ("kvtier-is-not-on-any-index>=1.0", "pytest>=8"))
    assert wheels.main(["unpack", "--wheels", str(tmp_path), "--into", str(tmp_path / "site")]) == 0
    said, lacking = capsys.readouterr().err.split("lacks ")
    assert "fetch them first" in said
    assert "kvtier-is-not-on-any-index" in lacking
    assert "pytest" not in lacking
    assert list((tmp_path / "site").glob("kvtier-*.dist-info/entry_points.txt"))


def test_wheels_are_unpacked(wheels: ModuleType, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "carried-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried.py", "VALUE = 7\n")
        wheel.writestr("carried-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: carried\nVersion: 1.0\n")
        wheel.writestr("carried-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("carried-1.0.dist-info/RECORD", "carried.py,,\n")
    for _ in range(2):
        assert wheels.main(["unpack", "--wheels", str(tmp_path), "--into", str(tmp_path / "site")]) == 0
    carried = tmp_path / "site" / "carried.py"
    assert carried.read_text() == "VALUE = 7\n"
    carried.unlink()
    assert wheels.main(["unpack", "--wheels", str(tmp_path), "--into", str(tmp_path / "site")]) == 0
    assert not carried.exists(), "nothing is done again"
    (tmp_path / "carried-1.0-py3-none-any.whl").rename(tmp_path / "carried-1.0-1-py3-none-any.whl")
    assert wheels.main(["unpack", "--wheels", str(tmp_path), "--into", str(tmp_path / "site")]) == 0
    assert carried.exists()


def test_a_checkout_beside_unpacked_wheels_has_its_commands(wheels: ModuleType, tmp_path: Path) -> None:
    """A pool is started by one."""
    for folder in (ROOT, ROOT / "benchmarks"):
        wheels.register(folder / "pyproject.toml", tmp_path)
    found = {
        each.name: {(entry.group, entry.name, entry.value) for entry in each.entry_points}
        for each in distributions(path=[str(tmp_path)])
    }
    assert set(found) == {"kvtier", "kvtier-bench"}
    assert ("kvtier.commands", "pool", "kvtier_pool.cli:app") in found["kvtier"]
    for name, there in found.items():
        installed = {(entry.group, entry.name, entry.value) for entry in distribution(name).entry_points}
        assert there == {entry for entry in installed if entry[0] != "console_scripts"}
