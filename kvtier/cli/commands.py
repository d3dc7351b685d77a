"""Commands that packages add through entry points: listed without importing their modules, loaded when one is called.

The line that `--help` prints for each comes from its source: the docstring of a function, or the `help` of a
`typer.Typer`. So `kvtier --help` needs nothing that a command needs, and a start of one pays for no other.
"""

import ast
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import InspectLoader
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

_Command = Callable[..., None]


class LazyGroup(TyperGroup):
    """A group of commands by entry points, and of others beside them."""

    def __init__(
        self,
        name: str,
        group: str,
        *,
        help: str,
        epilog: str | None = None,
        beside: Sequence[TyperCommand | TyperGroup] = (),
        last_words: Callable[[str], str | None] = lambda name: None,
    ) -> None:
        """`group` is the group of entry points, each of a `typer.Typer` or of a function; `beside` are in memory;
        `last_words` gives what the help of a command, and of those below it, ends with."""
        self._last_words = last_words
        self._entries: Mapping[str, EntryPoint] = {entry.name: entry for entry in entry_points(group=group)}
        commands: dict[str, Any] = {name: _listed(entry) for name, entry in self._entries.items()}
        commands.update({str(command.name): command for command in beside})
        # Without markup: help is full of [tables] and [settings], which are to be printed as they stand.
        super().__init__(
            name=name,
            help=help,
            epilog=epilog,
            commands=dict(sorted(commands.items())),
            no_args_is_help=True,
            rich_markup_mode=None,
            context_settings={"help_option_names": ["-h", "--help"]},  # of the commands below, too
        )

    def called(self, command: _Command) -> _Command:
        """What is called for the function of an entry point."""
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Finds the command and the arguments that are left, and imports the module of the command.

        :raises ModuleNotFoundError: the command needs something that is not installed.
        """
        name, command, rest = super().resolve_command(ctx, args)
        entry = self._entries.get(name or "")
        if entry is None or name is None:
            return name, command, rest
        loaded = _loaded(entry, self.called)
        _complete_help(loaded, self._last_words(name))
        return name, loaded, rest


def has_entries(group: str) -> bool:
    """Whether any installed distribution adds to this group of entry points."""
    return bool(entry_points(group=group))


def _listed(entry: EntryPoint) -> TyperCommand:
    """What stands for a command until it is called: a name and a line."""
    line = help_line(entry)
    return TyperCommand(name=entry.name, help=line, short_help=line, rich_markup_mode=None)


def _loaded(entry: EntryPoint, called: Callable[[_Command], _Command]) -> TyperCommand | TyperGroup:
    target = entry.load()
    around = typer.Typer(rich_markup_mode=None)
    around.callback()(lambda: None)  # makes it a group, whatever is in it
    if isinstance(target, typer.Typer):
        around.add_typer(target, name=entry.name)
    else:
        around.command(entry.name)(called(target))
    group: Any = typer.main.get_command(around)
    command: TyperCommand | TyperGroup = group.commands[entry.name]
    return command


def _complete_help(command: Any, words: str | None) -> None:
    """Ends the help of a command, and of those below it, with these words, and lists each by its whole first
    paragraph."""
    command.epilog = command.epilog or words
    command.short_help = command.short_help or " ".join((command.help or "").split("\n\n")[0].split())
    for below in getattr(command, "commands", {}).values():
        _complete_help(below, words)


def help_line(entry: EntryPoint) -> str:
    """The first paragraph of a command's help, read from its source; empty where that is not to be had.

    Imports the packages around the module, never the module.
    """
    try:
        spec = importlib.util.find_spec(entry.module)
    except ModuleNotFoundError:
        return ""
    loader = None if spec is None else spec.loader
    source = loader.get_source(entry.module) if isinstance(loader, InspectLoader) else None
    for node in ast.parse(source or "").body:
        if isinstance(node, ast.FunctionDef) and node.name == entry.attr:
            return (ast.get_docstring(node) or "").split("\n\n")[0]
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == entry.attr for t in node.targets):
            return _help_argument(node.value)
    return ""


def _help_argument(value: ast.expr) -> str:
    """The text of `help` in a call `typer.Typer(help="...")`; empty if `value` is no such call."""
    keywords = value.keywords if isinstance(value, ast.Call) else []
    texts = [keyword.value for keyword in keywords if keyword.arg == "help"]
    return str(texts[0].value) if texts and isinstance(texts[0], ast.Constant) else ""
