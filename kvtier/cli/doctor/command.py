"""The command `kvtier doctor`: what is looked at, and how it is printed."""

import getpass
import os
import sys
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from importlib.metadata import entry_points
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from kvtier.cli.columns import text_width
from kvtier.cli.configuration.all_checks import checks_of
from kvtier.cli.doctor.lines import Level, Line, Look
from kvtier.cli.doctor.machine import machine_looks
from kvtier.cli.doctor.patience import Patience
from kvtier.cli.doctor.running import run_looks
from kvtier.cli.options import print_json
from kvtier.clock import MONOTONIC
from kvtier.config import Config, load_config, parse_config
from kvtier.config.findings import Finding, Severity
from kvtier.errors import ConfigError, printable

LOOKS = "kvtier.doctor_looks"
"""Entry points: name -> `kvtier.cli.doctor.lines.Looks`."""
_LOADING_S, _LOOKS_S = 5.0, 22.0
"""Seconds for which the file, and then everything else, may be blocked: it hangs."""
_MOST_S = 120.0
"""Seconds for all looks together where cores are so busy that they do not come to their end."""
_WIDTH = 79
_INDENT = " " * 9
_LEVELS = {Severity.ERROR: Level.PROBLEM, Severity.WARNING: Level.WARNING, Severity.NOTE: Level.NOTE}


def doctor(
    config: Annotated[
        Path | None, typer.Option(help="TOML file of an engine, a pool or a gateway. Without: the environment alone.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, with problems too.")] = False,
) -> None:
    """Why does it not work? Looks at machine, file, disk, pool, Redis and engines, and says what to do.

    Give it the file that the process has, the same environment, and the same user and host (or container): it tries
    what that process would do. Each line is ok, a note, a warning or a problem, with its effect and what to do
    about it. It changes nothing but for a probe file in the disk folder, which it removes, prints no secrets, and
    waits 30 seconds at the most for what hangs. Exit code 0 without problems, 1 with one.

    Example, for an engine: kvtier doctor --config kvtier.toml

    Example, for a pool, as its user: sudo -u kvtier kvtier doctor --config /etc/kvtier/pool.toml

    Example, of problems alone: kvtier doctor --config kvtier.toml --json | jq '.lines[] | select(.level == "problem")'
    """
    begun = MONOTONIC()
    loaded: list[Config] = []
    # On a thread as well: a file may lie on a file system that hangs.
    loading = Look("configuration", lambda: _loading(config, loaded))
    (lines,), has_ended = run_looks([loading], Patience(_LOADING_S, _MOST_S))
    checks = [Look("configuration", partial(_checked, check)) for each in loaded for check in checks_of(each)]
    looks = machine_looks() + (_looks_of(loaded[0], config) if loaded else [])
    found, have_ended = run_looks(checks + looks, Patience(_LOOKS_S, _MOST_S))
    lines = _in_order([*lines, *chain(*found[: len(checks)])], chain(*found[len(checks) :]))
    has_problem = any(line.level is Level.PROBLEM for line in lines)
    if json:
        name = None if config is None else str(config)
        print_json({"file": name, "ok": not has_problem, "lines": [asdict(line) for line in lines]})
    else:
        _print(config, lines, MONOTONIC() - begun)
    if not (has_ended and have_ended):  # a thread that hangs in the kernel must not keep the process
        sys.stdout.flush()
        os._exit(int(has_problem))
    if has_problem:
        raise typer.Exit(1)


def _loading(file: Path | None, loaded: list[Config]) -> Iterable[Line]:
    """Reads the configuration into `loaded`."""
    try:
        config = load_config(file) if file is not None else parse_config({}, source="environment")
    except ConfigError as error:
        return [Line(Level.PROBLEM, "configuration", line) for line in str(error).splitlines()]
    loaded.append(config)
    return []


def _checked(check: Callable[[], Iterable[Finding]]) -> Iterable[Line]:
    """What `kvtier config check` says."""
    return map(_line_of, check())


def _in_order(of_configuration: list[Line], others: Iterable[Line]) -> list[Line]:
    """Each finding once, and what matters most first: a secret that is missing stops looks, too."""
    order, known = list(Level), {line.found for line in of_configuration}
    lines = [*dict.fromkeys(of_configuration), *(line for line in others if line.found not in known)]
    return sorted(lines, key=lambda line: order.index(line.level))


def _line_of(finding: Finding) -> Line:
    level = Level.PROBLEM if finding.defeats else _LEVELS[finding.severity]
    return Line(level, finding.key or "configuration", finding.text)


def _looks_of(config: Config, file: Path | None) -> list[Look]:
    return [look for entry in entry_points(group=LOOKS) for look in entry.load()(config, file)]


def _print(file: Path | None, lines: list[Line], seconds: float) -> None:
    print(f"kvtier doctor: {file or 'environment'}, as user {_user()}")
    for line in lines:
        text = f"{line.subject}: {line.found}" + (f"; {line.effect}" if line.effect else "")
        print(_filled(printable(text), f"{line.level.value:9}"))
        if line.remedy:
            print(_filled(line.remedy, f"{_INDENT}-> "))
    counts = ", ".join(_counted(sum(line.level is level for line in lines), level) for level in Level)
    print(_filled(f"{counts}; looked for {seconds:.1f} s", ""))


def _counted(count: int, level: Level) -> str:
    return f"{count} {level.value}" + ("s" if count != 1 and level is not Level.OK else "")


def _filled(text: str, begin: str) -> str:
    behind, width = " " * len(begin), text_width(_WIDTH)
    return textwrap.fill(
        text, width, initial_indent=begin, subsequent_indent=behind, break_long_words=False, break_on_hyphens=False
    )


def _user() -> str:
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a number without a name, as in containers
        return str(os.geteuid())
    return f"{name} ({os.geteuid()})"
