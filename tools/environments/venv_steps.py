"""Virtual environments that are made step by step: what `make_venv.py` of each engine has in common.

What has been done is written down in `prepared.json` after every step: an interrupted or repeated call goes on from
there, and a step whose recipe has changed is done again, with all that come after it.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

TORCH = "torch==2.13.0"
"""First and by itself: plain dependency resolution would take a build with gigabytes of CUDA where a CPU build of this
version is on offer."""
RECORD = "prepared.json"
_REQUIRED = "import importlib.metadata, json, sys; print(json.dumps(importlib.metadata.requires(sys.argv[1]) or []))"


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the way: done again when its recipe, or that of a step before it, is another one."""

    title: str
    recipe: list[str]
    run: Callable[[], None]
    needs: str = ""
    """What a machine has to have for it, where that is not obvious: said when it fails."""


class StepError(Exception):
    """A step failed: what it needs is not there, or a package index did not answer."""


class Environment:
    """A virtual environment in `folder`, to be filled step by step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        self._record = folder / RECORD

    def creation(self) -> Step:
        """The first step: from nothing, so that no half of an earlier attempt is left in it."""

        def create() -> None:
            shutil.rmtree(self.folder, ignore_errors=True)
            venv.create(self.folder, with_pip=True, symlinks=True)

        return Step("a virtual environment", [sys.version, str(self.folder)], create)

    def install(self, *arguments: str) -> None:
        """`pip install ARGUMENTS`; raises CalledProcessError when pip fails. Byte code is made when it is imported."""
        self.run("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile", *arguments)

    def required_by(self, distribution: str, *, but: str) -> list[str]:
        """What an installed distribution asks for, extras aside, without names that match the pattern `but`."""
        required: list[str] = json.loads(self.run("-c", _REQUIRED, distribution))
        return [line for line in required if "extra ==" not in line and not re.match(but, line)]

    def run(self, *arguments: str) -> str:
        """Output of the environment's Python."""
        return subprocess.run([self.python, *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout

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


@dataclass(frozen=True, slots=True)
class Checkout:
    """The checkout: the folder that has kvtier's `pyproject.toml`."""

    folder: Path

    @property
    def dependencies(self) -> list[str]:
        """What kvtier requires."""
        required: list[str] = _pyproject(self.folder)["project"]["dependencies"]
        return required

    def installation(self, environment: Environment) -> Step:
        """Installs kvtier so that changes of the checkout count at once."""
        whole = _pyproject(self.folder)
        project = whole["project"]
        # An editable installation points at these folders: a new one needs it done again.
        packages = whole["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
        benchmarks = self.folder / "benchmarks"
        cases = _pyproject(benchmarks)["project"]["entry-points"]
        recipe = [str(self.folder), json.dumps([project.get("scripts"), project.get("entry-points"), packages, cases])]
        editable = ["-e", str(self.folder), "-e", str(benchmarks)]
        return Step("kvtier and its benchmarks", recipe, lambda: environment.install("--no-deps", *editable))


def _pyproject(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text())


def look(environment: Environment, code: str, *, needs: str = "") -> Step:
    """The last step: what has been installed can be imported. `code` prints a line."""
    run = partial(_print_output, environment, code)
    return Step("a look whether all of it loads", [code], run, needs)


def _print_output(environment: Environment, code: str) -> None:
    print("   ", environment.run("-c", code).strip())


def prepare(environment: Environment, todo: Sequence[Step]) -> None:
    """Does what is not done yet; raises `StepError` at the first step that fails."""
    done = environment.done()
    kept = 0
    while kept < min(len(done), len(todo)) and done[kept] == todo[kept].recipe:
        kept += 1
    if kept:
        environment.note(done[:kept])  # An interruption from here on may not leave a record of what is being redone.
    for number, step in enumerate(todo[kept:], start=kept + 1):
        print(f"[{number}/{len(todo)}] {step.title} ...", flush=True)
        started = time.monotonic()
        try:
            step.run()
        except (OSError, subprocess.CalledProcessError) as error:
            needs = f"; it needs {step.needs}" if step.needs else ""
            raise StepError(f"{step.title} failed{needs}. {error}") from error
        environment.note([each.recipe for each in todo[:number]])
        print(f"    {time.monotonic() - started:.0f} s", flush=True)


def main(
    engine: str, into: str, steps: Callable[[Environment, Checkout, str], list[Step]], releases: Sequence[str]
) -> int:
    """The command. Exit code 1, and the step that failed, when there is no environment to use.

    :param into: where it is made unless the caller says so.
    :param releases: of the engine, that which is made unless the caller says so first.
    """
    parser = argparse.ArgumentParser(description=f"Prepares an environment in which {engine} runs with this checkout.")
    parser.add_argument("--into", type=Path, default=Path(into), help="folder of the environment")
    parser.add_argument("--checkout", type=Path, default=Path(), help="where kvtier's pyproject.toml is")
    parser.add_argument("--release", choices=releases, default=releases[0], help=f"release of {engine}")
    arguments = parser.parse_args()
    environment = Environment(arguments.into.absolute())
    try:
        prepare(environment, steps(environment, Checkout(arguments.checkout.resolve()), arguments.release))
    except StepError as error:
        print(f"No environment for {engine}: {error}\nCall again to go on from here.", file=sys.stderr)
        return 1
    return 0
