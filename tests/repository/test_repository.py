"""What keeps the repository in shape: packages, imports, and what may be imported without torch."""

import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONTAINERS = ("connectors", "kernels", "services", "benchmarks")
TOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
PACKAGES = {Path(folder).name for folder in TOOLS["hatch"]["build"]["targets"]["wheel"]["packages"]}


def test_containers_are_not_packages() -> None:
    for container in CONTAINERS:
        assert not (ROOT / container / "__init__.py").exists(), f"{container}/ only holds packages, it is none"


def test_every_package_is_shipped_and_checked() -> None:
    inits = [init for container in CONTAINERS for init in (ROOT / container).glob("*/__init__.py")]
    packages = {"kvtier", *(init.parent.name for init in inits)}
    layers = {name for layer in TOOLS["importlinter"]["contracts"][0]["layers"] for name in layer.split(" | ")}
    assert packages == PACKAGES | {"kvtier_bench"}, "the wheel's list in pyproject.toml"
    assert packages == set(TOOLS["mypy"]["packages"]), "mypy's list in pyproject.toml"
    assert packages == set(TOOLS["importlinter"]["root_packages"]), "import-linter's list in pyproject.toml"
    assert packages == layers, "the layers of the first contract in pyproject.toml"


def names_in_the_wheel(folder: Path, into: Path) -> list[str]:
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(into), "."]
    subprocess.run(command, cwd=folder, check=True, timeout=120)
    (wheel,) = into.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_the_wheel_holds_exactly_our_packages(tmp_path: Path) -> None:
    names = names_in_the_wheel(ROOT, tmp_path)
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == PACKAGES
    assert "kvtier/protocol/pool.proto" in names
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names), "type checkers of our users see no types"


def test_the_wheel_of_the_benchmarks_has_types(tmp_path: Path) -> None:
    assert "kvtier_bench/py.typed" in names_in_the_wheel(ROOT / "benchmarks", tmp_path)


WITHOUT_TORCH = """
import importlib, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {*"torch triton safetensors tokenizers gguf transformers aiohttp zmq jinja2".split()}:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Refuse())
"""

ASKED_EVERYWHERE = ("kvtier.doctor_looks", "kvtier.config_checks")
"""Groups of entry points whose modules `kvtier doctor` and `kvtier config check` import, whatever the file is for."""


@pytest.mark.parametrize(
    "modules",
    [
        "kvtier.cli.main kvtier.build.engine_cache kvtier.config kvtier.testing kvtier_pool.cli kvtier_pool.service",
        "kvtier_engine.cli kvtier_engine.demo.cli kvtier.offload kvtier.device.kv",
        " ".join(each.module for group in ASKED_EVERYWHERE for each in entry_points(group=group)),
    ],
)
def test_importable_without_torch(modules: str) -> None:
    """The pool service and the command line run from a base installation."""
    program = WITHOUT_TORCH + f"for name in '{modules}'.split(): importlib.import_module(name)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_command_that_needs_torch_says_so() -> None:
    program = WITHOUT_TORCH + "sys.argv = ['kvtier', 'bench', 'ttft']; import kvtier.cli.main; kvtier.cli.main.main()"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert answer.returncode == 1
    wanted = "this command needs torch, which is not installed: in a checkout of kvtier, pip install '.[engine]'"
    assert answer.stderr == f"kvtier: {wanted}\n"


def test_a_gateway_without_its_packages_says_so(tmp_path: Path) -> None:
    key = f"[api_keys.alice]\ntenant = 'a'\nkey_sha256 = ['{'cd' * 32}']\n[tenants.a]\n"
    (file := tmp_path / "kvtier.toml").write_text(f"[gateway]\nengines = ['http://127.0.0.1:8000']\n{key}")
    program = (
        "import sys; sys.modules['uvloop'] = None; import kvtier.cli.main; "
        f"sys.argv = ['kvtier', 'gateway', 'serve', '--config', '{file}']; kvtier.cli.main.main()"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    wanted = "this command needs uvloop, which is not installed: in a checkout of kvtier, pip install '.[gateway]'"
    assert (answer.returncode, answer.stderr) == (1, f"kvtier: {wanted}\n")


def test_an_engine_without_a_pool_imports_no_grpc() -> None:
    program = "import sys, kvtier.build.engine_cache; sys.exit('grpc' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_every_dependency_has_a_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    rows = (ROOT / "docs" / "dependencies.md").read_text().splitlines()
    explained = {name for row in rows if row.startswith("|") for name in re.findall(r"[\w-]+", row.split("|")[1])}
    for requirement in [*project["dependencies"], *extras["engine"], *extras["dev"]]:
        name = re.split(r"[>=\[; ]", requirement)[0]
        assert name in explained or name.startswith("types-"), f"docs/dependencies.md does not say why {name} is needed"


def test_the_command_lists_its_parts() -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "kvtier.cli.main", "--help"], capture_output=True, text=True, check=True, timeout=60
    )
    for command in ("pool", "engine", "demo", "bench"):
        assert command in answer.stdout


COMMAND_MODULES = "numpy grpc torch redis kvtier.config kvtier.cli.stats.command kvtier_pool.cli kvtier_engine.cli"


@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [
        ("--help", f"pydantic {COMMAND_MODULES}"),
        ("bench --help", COMMAND_MODULES),  # of a command's own options, typer itself parses with pydantic
    ],
)
def test_help_imports_nothing_that_only_commands_need(arguments: str, heavy: str) -> None:
    program = f"""
import sys
import kvtier.cli.main
sys.argv = ["kvtier", *{arguments.split()!r}]
try:
    kvtier.cli.main.main()
except SystemExit as end:
    assert not end.code, end.code
sys.exit(", ".join(set({heavy.split()!r}) & set(sys.modules)) or 0)
"""
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert answer.returncode == 0, f"imported: {answer.stderr}"


def test_the_map_of_modules_is_true() -> None:
    """`docs/structure.md` has a line per module, and each module says what it is."""
    answer = subprocess.run([sys.executable, str(ROOT / "tools" / "structure.py")], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
