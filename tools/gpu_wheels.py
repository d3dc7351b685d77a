"""Wheels for a machine with a GPU that has torch, triton and numpy, and no way to a package index.

    python tools/gpu_wheels.py fetch [--into .gpu/wheels]      where there is an index
    python tools/gpu_wheels.py unpack [--into .gpu/site]       there, before `make gpu`

`fetch` downloads what pyproject.toml names as dependencies of kvtier and its engine, and what those need, for CPython
3.12 on Linux x86-64; `unpack` puts them where Python finds them, beside what the machine has, and makes the checkout's
commands known there. Both are safe to repeat; what has been unpacked already is left as it is. Without wheels, `unpack`
names what the machine lacks and does the rest: most of what `make gpu` measures needs little.
"""

import argparse
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path

PYTHON = "3.12"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
"""pip takes each of them literally."""
THERE = ("numpy", "torch", "triton")
"""What is there already, and must not be another one."""
TOOLS = ("pytest", "pytest-timeout", "hypothesis", "psutil")
"""What the tests for machines with a GPU take beside it."""
MOST_BYTES = 40 << 20
"""The most bytes of all wheels together: 64 MiB may be carried along, and the checkout takes its part of them."""

_ROOT = Path(__file__).parents[1]


def requirements(pyproject: Path) -> list[str]:
    """What to download: dependencies of the base installation and of the engine, and the tools."""
    project = tomllib.loads(pyproject.read_text())["project"]
    dependencies: list[str] = project["dependencies"] + project["optional-dependencies"]["engine"]
    return [*(of for of in dependencies if not of.startswith(THERE)), *TOOLS]


def download_command(into: Path, wanted: Sequence[str]) -> list[str]:
    """pip's, for a machine that is not this one."""
    platforms = [argument for platform in PLATFORMS for argument in ("--platform", platform)]
    target = ["--python-version", PYTHON, "--implementation", "cp", *platforms]
    return [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--only-binary=:all:",
        *target,
        "-d",
        str(into),
        *wanted,
    ]


def fetch(into: Path) -> int:
    """The exit status."""
    into.mkdir(parents=True, exist_ok=True)
    for wheel in into.glob("*.whl"):  # of an earlier time: two versions of one package stop the unpacking
        wheel.unlink()
    subprocess.run(download_command(into, requirements(_ROOT / "pyproject.toml")), check=True)
    for name in THERE:
        for wheel in into.glob(f"{name}-*.whl"):
            wheel.unlink()
    wheels = sorted(into.glob("*.whl"))
    nbytes = sum(wheel.stat().st_size for wheel in wheels)
    print(f"{len(wheels)} wheels, {nbytes / 2**20:.1f} MiB, in {into}")
    if nbytes > MOST_BYTES:
        print(f"more than {MOST_BYTES / 2**20:.0f} MiB: too much to carry along", file=sys.stderr)
        return 1
    return 0


def register(pyproject: Path, into: Path) -> None:
    """Lets Python find the checkout's commands as if it were installed: by them, services are started."""
    project = tomllib.loads(pyproject.read_text())["project"]
    name, version = project["name"], project["version"]
    folder = into / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    groups = (
        "\n".join([f"[{group}]", *(f"{command} = {where}" for command, where in commands.items()), ""])
        for group, commands in project["entry-points"].items()
    )
    (folder / "entry_points.txt").write_text("\n".join(groups))


def unpack(wheels: Path, into: Path) -> int:
    """The exit status."""
    found = sorted(wheels.glob("*.whl"))
    for pyproject in (_ROOT / "pyproject.toml", _ROOT / "benchmarks" / "pyproject.toml"):
        register(pyproject, into)
    if not found:
        lacking = ", ".join(lacking_here(requirements(_ROOT / "pyproject.toml"))) or "nothing"
        print(f"no wheels in {wheels}: fetch them first. This Python lacks {lacking}", file=sys.stderr)
        return 0
    unpacked, stamp = into / "unpacked.txt", "".join(f"{wheel.name} {wheel.stat().st_size}\n" for wheel in found)
    if unpacked.exists() and unpacked.read_text() == stamp:
        return 0
    options = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--upgrade", "--target", str(into)]
    status = subprocess.run([sys.executable, "-m", "pip", "install", *options, *map(str, found)]).returncode
    if status == 0:
        unpacked.write_text(stamp)
    return status


def lacking_here(wanted: Sequence[str]) -> list[str]:
    """The requirements of which this Python has no version."""
    names = [re.split(r"[^\w.-]", requirement, maxsplit=1)[0] for requirement in wanted]
    return [name for name in names if not list(distributions(name=name))]


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["fetch", "unpack"])
    parser.add_argument("--wheels", type=Path, default=_ROOT / ".gpu" / "wheels")
    parser.add_argument("--into", type=Path, help="another place than .gpu/wheels or .gpu/site")
    options = parser.parse_args(arguments)
    if options.step == "fetch":
        return fetch(options.into or options.wheels)
    return unpack(options.wheels, options.into or _ROOT / ".gpu" / "site")


if __name__ == "__main__":
    sys.exit(main())
