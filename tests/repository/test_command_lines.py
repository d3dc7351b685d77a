"""Every command line of kvtier that the documentation shows can be typed: its commands and options are there."""

import functools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup

from kvtier.cli.main import make_app

ROOT = Path(__file__).resolve().parents[2]
HISTORY = ("CHANGELOG.md", "docs/performance-diary.md", "docs/adr", "docs/structure.md")
"""Pages that tell of commands as they were, and one that is made of docstrings."""
PAGES = [
    page
    for page in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md")])
    if not str(page.relative_to(ROOT)).startswith(HISTORY)
]
FENCED = re.compile(r"```.*?```", re.DOTALL)
IN_TEXT = re.compile(r"`(kvtier [^`]+)`")
PLACEHOLDER = re.compile(r"[A-Z_.|]+|\.\.\.|…")


whole = functools.cache(make_app)


def command_lines(text: str) -> Iterator[str]:
    for block in FENCED.findall(text):
        if not block.startswith("```sh\n"):
            continue
        for line in block.replace("\\\n", " ").splitlines():
            if line.strip().startswith("kvtier "):
                yield line.strip()
    for span in IN_TEXT.findall(FENCED.sub("", text)):
        if span.split()[1] in whole().commands:  # what is logged may begin with kvtier, too
            yield " ".join(span.split())


def problems(line: str) -> list[str]:
    """What of a command line is not there."""
    words = shlex.split(line.partition(" #")[0].partition(" > ")[0].partition(" | ")[0])[1:]
    command, context = whole(), typer.Context(whole())
    while isinstance(command, TyperGroup) and words and not words[0].startswith("-"):
        if PLACEHOLDER.fullmatch(words[0]):
            return []
        try:
            _, command, words = command.resolve_command(context, words)
        except Exception as error:
            return [f"{line}: {error}"]
        context = typer.Context(command, parent=context)
    known = {option for param in command.params for option in (*param.opts, *param.secondary_opts)} | {"-h", "--help"}
    named = [word.partition("=")[0].rstrip(",") for word in words if re.match(r"--?[a-z]", word)]
    return [f"{line}: no option {name}" for name in named if name not in known]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_command_lines_are_there(page: Path) -> None:
    assert [problem for line in command_lines(page.read_text()) for problem in problems(line)] == []


def test_what_is_not_there_is_found() -> None:
    lines = list(
        command_lines("Type `kvtier stats --colour` or\n```sh\nkvtier pool brew  # tea\nkvtier size M \\\n  --x=1\n```")
    )
    assert lines == ["kvtier pool brew  # tea", "kvtier size M    --x=1", "kvtier stats --colour"]
    assert all(len(problems(line)) == 1 for line in lines)
    assert not problems("kvtier bench flood --rounds 3 --json -")
