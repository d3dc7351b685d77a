"""The command line: what is listed, what help looks like, and what it says about what is not installed."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli import app as command_line
from kvtier.cli.commands import LazyGroup, help_line
from kvtier.errors import KvtierError

ROOT = Path(__file__).resolve().parents[2]


def without_blanks(text: str) -> str:
    """Removes blanks, and the backspace by which a paragraph says that its lines are not to be filled."""
    return re.sub(r"[\s\x08]", "", text)


def help_of(command: Any) -> str:
    return str(command.get_help(command.context_class(command, info_name=command.name)))


def commands_below(group: Any) -> Iterator[Any]:
    """Every command that can be called, imported as by a call."""
    ctx = group.context_class(group, info_name=group.name)
    for name in group.list_commands(ctx):
        _, command, _ = group.resolve_command(ctx, [name])
        if hasattr(command, "list_commands"):
            yield from commands_below(command)
        else:
            yield command


def test_help_prints_what_was_written() -> None:
    """Square brackets too, which a reader of markup takes for styles."""
    commands = list(commands_below(command_line.make_app()))
    assert {"serve", "stats", "fsck", "inspect", "demo", "hash"} <= {command.name for command in commands}
    with_brackets = 0
    for command in commands:
        shown = without_blanks(help_of(command))
        for text in (command.help or "", *(getattr(param, "help", None) or "" for param in command.params)):
            assert without_blanks(text) in shown, f"kvtier ... {command.name} --help"
            with_brackets += "[" in text
    assert with_brackets, "nothing was tested: no help has square brackets any more"


def test_lists_of_commands_are_not_cut_short() -> None:
    top: Any = command_line.make_app()
    ctx = top.context_class(top, info_name=top.name)
    groups = [
        top,
        *(command for name in top.list_commands(ctx) for _, command, _ in [top.resolve_command(ctx, [name])]),
    ]
    lists = [help_of(group).split("Commands:")[1] for group in groups if hasattr(group, "list_commands")]
    assert len(lists) > 3
    assert all("..." not in listed for listed in lists)


def test_every_command_has_an_example_and_ends_with_a_page() -> None:
    for command in commands_below(command_line.make_app()):
        shown = " ".join(help_of(command).split())
        assert re.search(r"Examples?(, [^:]+)?: ", shown), f"kvtier ... {command.name} --help"
        page = re.search(r"More in ([\w./-]+\.md)\.$", shown)
        assert page is not None, f"kvtier ... {command.name} --help ends with {shown[-40:]!r}"
        assert (ROOT / page[1]).is_file()


def test_help_of_all_imports_what_no_command_needs() -> None:
    """Each would take a tenth of a second or more, and completion asks for it at every key."""
    heavy = ("numpy", "pydantic", "grpc", "torch", "prometheus_client", "msgpack", "redis")
    told = "import sys; from kvtier.cli.main import main; sys.argv[1:] = ['--help']\ntry: main()\n"
    told += f"finally: print('imported', [name for name in {heavy!r} if name in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, timeout=60, check=True)
    assert "Commands:" in answer.stdout
    assert answer.stdout.endswith("imported []\n")


def test_every_command_has_a_line() -> None:
    entries = [*entry_points(group=command_line.COMMANDS), *entry_points(group=command_line.BENCH_CASES)]
    assert len(entries) > 10
    listed = help_of(command_line.make_app()) + help_of(LazyGroup("bench", command_line.BENCH_CASES, help=""))
    for entry in entries:
        assert help_line(entry), f"{entry.value} has no docstring and no help="
        assert without_blanks(help_line(entry)) in without_blanks(listed), "the whole line, not cut short"


@pytest.mark.parametrize("value", ["kvtier_is_not_here.cli:app", "kvtier.cli.app:absent", "sys:exit"])
def test_what_has_no_source_has_no_line(value: str) -> None:
    assert help_line(EntryPoint("name", value, command_line.COMMANDS)) == ""


@pytest.mark.parametrize("arguments", [[], ["hash", "--rounds", "3"], ["--json"]])
def test_without_the_benchmarks_bench_says_how_to_get_them(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_line, "BENCH_CASES", "kvtier.bench that nobody adds to")
    with pytest.raises(KvtierError, match=r"pip install \./benchmarks"):
        command_line.make_app()(["bench", *arguments])
    assert "pip install ./benchmarks" in help_of(command_line.make_app())


@pytest.mark.parametrize(
    "arguments",
    ["inspect /nowhere", "fsck /nowhere", "size /nowhere", "config keys nosuch", "config show /nowhere",
     "config check /nowhere", "tenants list --pid 1", "stats --url 127.0.0.1:1", "doctor --config /nowhere",
     "simulate /nowhere", "simulate-fleet /nowhere", "demo --model /nowhere", "bench replay /nowhere"],
)  # fmt: skip
def test_failures_are_told_in_json(
    arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kvtier", *arguments.split(), "--json"])
    with pytest.raises(SystemExit) as ended:
        command_line.run()
    assert ended.value.code == 1
    assert isinstance(json.loads(capsys.readouterr().out), dict)


@pytest.mark.parametrize(
    ("arguments", "unbuffered"), [("--help", ""), ("--version", ""), ("config schema", ""), ("config schema", "1")]
)
def test_a_full_device_is_told_in_a_line(arguments: str, unbuffered: str) -> None:
    command = [sys.executable, "-m", "kvtier.cli.main", *arguments.split()]
    environ = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, env=environ)
    assert ended.returncode == 1
    assert ended.stderr.startswith("kvtier: the output cannot be written: No space left on device; direct it")
    assert ended.stderr.count("\n") == 1


def test_a_reader_that_has_had_enough_ends_a_command_in_silence() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "kvtier.cli.main", "--version"]
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (1, "")


def test_ctrl_c_while_a_command_is_imported_ends_it_in_silence() -> None:
    program = (
        "import sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'typer': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "from kvtier.cli.main import main\n"
        "main()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")
