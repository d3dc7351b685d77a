"""A command in this process, as users run it in a terminal of 80 columns."""

from collections.abc import Callable
from pathlib import Path

import typer
from typer.testing import CliRunner, Result

from kvtier.errors import ConfigError


def run_command(command: Callable[..., None], *arguments: str | Path) -> Result:
    """What it has printed. Raises the `ConfigError` that it ends with."""
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command()(command)
    answer = CliRunner(env={"COLUMNS": "80", "TERM": "dumb"}).invoke(app, list(map(str, arguments)))
    if isinstance(answer.exception, ConfigError):
        raise answer.exception
    assert answer.exit_code == 0, answer.output
    return answer
