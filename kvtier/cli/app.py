"""The commands of `kvtier`. Packages add commands through the entry point groups below; the core imports none of them.

kvtier.commands   name -> typer.Typer (a group of commands) or a function (one command)
kvtier.bench      name -> function: one case of `kvtier bench`
"""

import errno
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from kvtier.cli.commands import LazyGroup, has_entries
from kvtier.errors import KvtierError, printable
from kvtier.system.logs import log_fatal

COMMANDS = "kvtier.commands"
BENCH_CASES = "kvtier.bench"
_HELP = "Multi-tier KV cache offload for LLM inference."
_EPILOG = (
    "Exit codes: 0 done; 1 it failed, and the last line of standard error says why and what to do, or who read the "
    "output has gone; 2 the command line is wrong. Completion: kvtier --install-completion. More in docs/README.md."
)
_PAGES = {
    "config": "docs/configuration.md",
    "demo": "README.md",
    "engine": "docs/engine-api.md",
    "fsck": "docs/disk-format.md",
    "gateway": "docs/gateway.md",
    "inspect": "docs/disk-format.md",
    "simulate": "docs/policies.md",
    "trace": "docs/policies.md",
}
_PAGE = "docs/deployment.md"
"""What says more about the commands that are not named above."""
_BENCH_PAGE = "benchmarks/README.md"
_OF_GATEWAYS = ("aiohttp", "uvloop")
"""Packages that `kvtier gateway` needs and `kvtier engine` does not."""
_OUTPUT_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EPIPE}
_BENCH_HELP = "Measure, beside a floor or a peer in the same run."


def _print_version(ctx: typer.Context, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        print(f"kvtier {version('kvtier')}")
        ctx.exit()


class _Cases(LazyGroup):
    """The cases of `kvtier bench`, whose failures are told in JSON to who asks for JSON."""

    def called(self, command: Callable[..., None]) -> Callable[..., None]:
        # Not before a case is called: a list of commands needs no configuration.
        from kvtier.cli.options import telling_in_json

        return telling_in_json(command)


def make_app() -> TyperGroup:
    """The whole command tree. Imports no module of a command: that comes with the call of one."""
    app = LazyGroup("kvtier", COMMANDS, help=_HELP, epilog=_EPILOG, beside=[_bench()], last_words=_page)
    app.params.extend(_top_options())
    return app


def run() -> None:
    """Runs the command line of this process. What fails is told in one line without a traceback, where the error says
    what to do or is about the output; exit code 1."""
    try:
        try:
            make_app()(prog_name="kvtier")
        finally:
            if sys.stdout is not None:  # None: it was closed before the start
                sys.stdout.flush()
    except KvtierError as error:
        _fail("\n".join(map(printable, str(error).split("\n"))))
    except ModuleNotFoundError as error:
        # One of our own modules missing is a bug.
        if error.name is None or error.name.startswith("kvtier"):
            raise
        extra = "gateway" if error.name in _OF_GATEWAYS else "engine"
        remedy = f"in a checkout of kvtier, pip install '.[{extra}]'"
        _fail(f"this command needs {error.name}, which is not installed: {remedy}")
    except OSError as error:
        if error.errno not in _OUTPUT_ERRORS or error.filename is not None:
            raise
        # The interpreter would try to write what is left, and say that it cannot.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:  # who reads has had enough
            sys.exit(1)
        _fail(f"the output cannot be written: {error.strerror}; direct it to where there is room")


def _fail(text: str) -> NoReturn:
    """Ends the process with this line as the last one."""
    if not log_fatal(text):
        print(f"kvtier: {text}", file=sys.stderr)
    sys.exit(1)


def _top_options() -> list[Any]:
    """The options of `kvtier` itself: the release, and what makes shells complete its commands."""
    around = typer.Typer(rich_markup_mode=None)  # adds --install-completion and --show-completion
    around.callback()(_top)
    return [param for param in typer.main.get_command(around).params if param.name != "help"]


def _top(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Show the release and exit.")
    ] = False,
) -> None:
    """Does nothing: its options end the process."""


def _page(command: str) -> str:
    return f"More in {_PAGES.get(command, _PAGE)}."


def _example_of_case(case: str) -> str:
    return f"Example: kvtier bench {case} --json. More in {_BENCH_PAGE}."


def _bench() -> TyperCommand | TyperGroup:
    if has_entries(BENCH_CASES):
        return _Cases("bench", BENCH_CASES, help=_BENCH_HELP, last_words=_example_of_case)
    line = f"{_BENCH_HELP} Not installed: pip install ./benchmarks"
    return TyperCommand(
        name="bench",
        help=line,
        short_help=line,
        callback=_without_benchmarks,
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
        rich_markup_mode=None,
    )


def _without_benchmarks() -> None:
    raise KvtierError(
        "the benchmarks are a distribution of their own, kvtier-bench, which is not installed: "
        "in a checkout of kvtier, pip install ./benchmarks"
    )
