"""The commands `kvtier config keys|schema|show|check|init`."""

import json as json_module
import os
import sys
import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtier.cli.columns import text_width
from kvtier.cli.configuration.all_checks import findings_of
from kvtier.cli.configuration.effective import Setting, settings_of
from kvtier.cli.configuration.starting_files import Role, starting_file
from kvtier.cli.options import Json, print_json, telling_in_json
from kvtier.config import load_config
from kvtier.config.findings import Finding, Severity
from kvtier.config.reference import Key, json_schema, keys
from kvtier.errors import ConfigError, printable

_FILE_MODE = 0o600

app = typer.Typer(
    help="The configuration: a file to begin with, every key, what a file comes to, and what is wrong with it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
File = Annotated[Path, typer.Argument(help="TOML file of an engine, of a pool, or of both.")]


@app.command("keys")
@telling_in_json
def list_keys(
    prefix: Annotated[str, typer.Argument(help="Only keys that begin so, such as pool_service.redis.")] = "",
    json: Json = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print docs/configuration.md.")] = False,
) -> None:
    """Every key that a file may have.

    Prints what may stand there, what stands there without it, and what it does.

    Example: kvtier config keys pool_service.disk
    """
    found = [key for key in keys() if key.path.startswith(prefix)]
    if not found:
        raise ConfigError(f"no key begins with {prefix!r}; kvtier config keys lists all")
    if json:
        print_json({"keys": [_plain(key) for key in found]})
    elif markdown:
        print(markdown_page(found), end="")
    else:
        for key in found:
            _print_key(key)


@app.command()
def schema() -> None:
    """The JSON schema of the file, for editors.

    Taplo and Even Better TOML complete and check a file whose first line is `#:schema kvtier.schema.json`.

    Example: kvtier config schema > kvtier.schema.json
    """
    print_json(json_schema())


@app.command()
@telling_in_json
def show(
    file: File,
    all_keys: Annotated[bool, typer.Option("--all", help="Keys that have their defaults, too.")] = False,
    json: Json = False,
) -> None:
    """What a file and the environment come to.

    Prints every key that is set, and who has set it. Secrets are not resolved.

    Example: KVTIER__HOST__CAPACITY_BYTES=4GiB kvtier config show kvtier.toml
    """
    shown = [setting for setting in settings_of(file, os.environ) if all_keys or setting.source != "default"]
    if json:
        settings = [{"key": found.key, "value": found.value, "source": found.source} for found in shown]
        print_json({"file": str(file), "settings": settings})
        return
    for setting in shown:
        print(_setting_line(setting))


@app.command()
def check(
    file: File,
    json: Json = False,
) -> None:
    """Whether a process would start with a file, and what it wastes.

    Prints errors, settings that contradict each other or do nothing, and what sizes come to.
    Starts nothing, connects to nothing, changes nothing. Exit code 0 without errors, 1 with one. Run it with the
    environment that the process will have: it reads secrets.

    Example: kvtier config check /etc/kvtier/kvtier.toml
    """
    found = findings(file)
    is_sound = all(finding.severity is not Severity.ERROR for finding in found)
    if json:
        listed = [{"severity": f.severity.value, "key": f.key, "text": f.text, "defeats": f.defeats} for f in found]
        print_json({"file": str(file), "ok": is_sound, "findings": listed})
    else:
        for finding in found:
            where = f"{finding.key}: " if finding.key else ""
            print(printable(f"{finding.severity.value}: {where}{finding.text}"))
        print(f"{file}: {_verdict(found)}")
    if not is_sound:
        raise typer.Exit(1)


@app.command()
def init(
    role: Annotated[Role, typer.Argument(help="The process that the file is for.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write it to this new file.")] = None,
) -> None:
    """A commented file to begin with.

    It has what is recommended. A file that is there is never overwritten.

    Example: kvtier config init engine --output kvtier.toml
    """
    text = starting_file(role)
    if output is None:
        print(text, end="")
        return
    try:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _FILE_MODE)
    except OSError as error:
        raise ConfigError(f"--output {output}: {error.strerror}; name a new file in a folder that is there") from error
    with open(descriptor, "w") as written:
        written.write(text)
    print(f"{output}: written; export the variables that it names, then: kvtier config check {output}", file=sys.stderr)


def findings(file: Path) -> list[Finding]:
    """Returns what all installed packages find, errors first."""
    try:
        config = load_config(file)
    except ConfigError as error:
        return [Finding(Severity.ERROR, "", line) for line in str(error).splitlines()]
    return findings_of(config)


def _verdict(found: list[Finding]) -> str:
    if any(finding.severity is Severity.ERROR for finding in found):
        return "nothing would start with it"
    defeated = [finding.key for finding in found if finding.defeats]
    if defeated:
        return f"a process starts with it, and cannot do what is set: {', '.join(dict.fromkeys(defeated))}"
    return "it can be used"


def markdown_page(found: list[Key]) -> str:
    """Returns the page of all keys, a section per table."""
    lines = [
        "# Configuration",
        "",
        "The configuration is one TOML file. `KVTIER__TABLE__KEY=value` in the environment wins over it, such as",
        "`KVTIER__HOST__CAPACITY_BYTES=4GiB`. `kvtier config init engine` (or `pool`) writes a file to begin with,",
        "`kvtier config check FILE` says what is wrong with one, `kvtier config show FILE` what it comes to, and",
        "`kvtier config schema` is for editors. `kvtier config keys --markdown` prints this page.",
    ]
    table: str | None = None
    for key in found:
        if key.table != table:
            table = key.table
            title = f"`[{table}]`" if table else "The top of the file"
            lines += [
                "",
                f"## {title}",
                "",
                "| key | what it may be | without it | what it does |",
                "| --- | --- | --- | --- |",
            ]
        cells = (f"`{key.name}`", key.kind, f"`{key.default}`" if key.default else "", key.text)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _plain(key: Key) -> dict[str, Any]:
    return {"key": key.path, "kind": key.kind, "default": key.default, "text": key.text}


def _print_key(key: Key) -> None:
    print(f"{key.path} = {key.default}" if key.default else key.path)
    width, indent = text_width(78), "    "
    for paragraph in (key.kind, key.text):
        if paragraph:
            print(
                textwrap.fill(paragraph, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False)
            )


def _setting_line(setting: Setting) -> str:
    return f"{setting.key} = {json_module.dumps(setting.value, default=str)}  # {setting.source}"
