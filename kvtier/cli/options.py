"""Options that commands have in common, and the check that what they name can be written."""

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ParamSpec

import typer

from kvtier.cli.canvas import require_drawable
from kvtier.config import Config
from kvtier.errors import ConfigError, KvtierError
from kvtier.system.logs import Format, Level

_P = ParamSpec("_P")


def command_group(*, help: str) -> typer.Typer:
    """Makes a group of commands with this help. Its first command is one of its own even while there is no other."""
    group = typer.Typer(help=help, no_args_is_help=True, pretty_exceptions_enable=False)
    group.callback()(lambda: None)
    return group


def print_json(value: Any) -> None:
    """Prints `value` to standard output, indented."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def telling_in_json(command: Callable[_P, None]) -> Callable[_P, None]:
    """The command, which prints `{"error": ...}` before it fails where its parameter `json` is set."""

    @functools.wraps(command)
    def telling(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except KvtierError as error:
            if kwargs.get("json"):
                print_json({"error": str(error)})
            raise

    return telling


def require_writable(option: str, path: Path) -> None:
    """Raises `ConfigError` when the file cannot be written: ask before measuring for an hour.

    Leaves everything as it was: what is there keeps its bytes, what is not there is not there afterwards.
    """
    try:
        target = path.resolve()
        if not target.exists():
            target.open("xb").close()
            target.unlink()
        elif target.is_file():
            target.open("ab").close()
        elif target.is_dir():
            raise IsADirectoryError("it is a folder")
        elif not os.access(target, os.W_OK):  # a pipe or a device: opening one may block, or end its reader
            raise PermissionError("not permitted")
    except (OSError, RuntimeError, ValueError) as error:
        # Python 3.11 and 3.12 raise RuntimeError for links in a circle; ValueError is for a NUL in the name.
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise ConfigError(
            f"{option} {path}: cannot be written: {reason}; name a file in a folder that exists and is yours to write"
        ) from error


def writable(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """The callback of an option that names a file to write."""
    if path is not None:
        require_writable(option.opts[0], path)
    return path


def _drawable(option: typer.CallbackParam, path: Path | None) -> Path | None:
    if path is not None:
        require_drawable(path)
    return writable(option, path)


Json = Annotated[bool, typer.Option("--json", help="Print JSON, on failure too.")]
Plot = Annotated[Path | None, typer.Option(help="Draw the figures to this .svg or .png file.", callback=_drawable)]


LogLevel = Annotated[
    Level | None, typer.Option(help="Log kvtier's own lines from this level on. Default: [log] of the file, else info.")
]
LogFormat = Annotated[
    Format | None,
    typer.Option(help="Log text, or JSON with an object a line. Default: [log] of the file, else text."),
]


def with_log_options(config: Config, level: Level | None, format: Format | None) -> Config:
    """The configuration with the command line's `--log-level` and `--log-format` in place of the file's."""
    given = {name: value for name, value in (("level", level), ("format", format)) if value is not None}
    return config.model_copy(update={"log": config.log.model_copy(update=given)})
