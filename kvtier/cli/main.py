"""The command `kvtier`. Packages add commands through the entry point groups below; the core imports none of them.

kvtier.commands   name -> typer.Typer (a group of commands) or a function (one command)
kvtier.bench      name -> function: one case of `kvtier bench`
"""

import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer

from kvtier.errors import KvtierError

COMMANDS = "kvtier.commands"
BENCH_CASES = "kvtier.bench"


def make_app() -> typer.Typer:
    """The whole command tree. Loads every installed command module, none of which imports torch at its top."""
    app = typer.Typer(
        name="kvtier",
        help="Multi-tier KV cache offload for LLM inference.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    bench = typer.Typer(help="Measure, beside a floor or a peer in the same run.", no_args_is_help=True)
    app.add_typer(bench, name="bench")
    _add_entry_points(app, COMMANDS)
    _add_entry_points(bench, BENCH_CASES)
    return app


def main() -> None:
    """Entry point. Errors that say what to do are printed without a traceback; exit code 1."""
    try:
        make_app()()
    except KvtierError as error:
        print(f"kvtier: {error}", file=sys.stderr)
        sys.exit(1)
    except ModuleNotFoundError as error:
        # Commands import torch and the like when they run. One of our own modules missing is a bug.
        if error.name is None or error.name.startswith("kvtier"):
            raise
        print(f"kvtier: {_missing(error)}", file=sys.stderr)
        sys.exit(1)


def _add_entry_points(app: typer.Typer, group: str) -> None:
    for entry in sorted(entry_points(group=group), key=lambda e: e.name):
        try:
            command = entry.load()
        except ModuleNotFoundError as error:
            command = _unavailable(entry, error)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=entry.name)
        else:
            app.command(entry.name)(command)


def _unavailable(entry: EntryPoint, error: ModuleNotFoundError) -> Callable[[], Any]:
    """A command that says what to install, so that a base installation still lists it."""

    def command() -> None:
        raise KvtierError(_missing(error))

    command.__doc__ = f"Not available: {error.name} is not installed."
    return command


def _missing(error: ModuleNotFoundError) -> str:
    return f"this command needs {error.name}, which is not installed: pip install 'kvtier[engine]'"


if __name__ == "__main__":
    main()
