"""Every command line that the documentation shows can be typed: its commands, options, extras and files are there."""

import ast
import functools
import importlib.util
import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup

from kvtier.cli.app import make_app

ROOT = Path(__file__).resolve().parents[2]
HISTORY = ("CHANGELOG.md", "docs/performance-diary.md", "docs/adr", "docs/structure.md")
"""Pages that tell of commands as they were, and one that is made of docstrings."""
PAGES = [
    page
    for page in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md")])
    if not str(page.relative_to(ROOT)).startswith(HISTORY)
]
FENCED = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
IN_TEXT = re.compile(r"`((?:kvtier|pip|python3?|make|docker-compose|vllm) [^`]+)`")
QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
STARTS = re.compile(r"\s*(kvtier|pip|python3?|make|docker-compose|vllm|curl|openssl) \S")
PLACEHOLDER = re.compile(r"[A-Z_.|]+|\.\.\.|…")

whole = functools.cache(make_app)
page_of_each = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@functools.cache
def names_in(file: str, pattern: str) -> set[str]:
    return set(re.findall(pattern, (ROOT / file).read_text(), flags=re.MULTILINE))


@functools.cache
def extras() -> set[str]:
    return set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


def scripts(text: str) -> Iterator[str]:
    for indent, language, body in FENCED.findall(text):
        if language == "sh":
            yield re.sub(f"(?m)^{indent}", "", body)


def command_lines(text: str) -> Iterator[str]:
    """Commands of scripts, a line each, and those within sentences."""
    for script in scripts(text):
        script = re.sub(r"(?m)(^| )#.*$", "", script).replace("\\\n", " ")
        quoted = QUOTED.sub(lambda quote: quote[0].replace("\n", " "), script)
        for line in quoted.splitlines():
            command = re.sub(r"^(\w+=[\w./:]+ )+", "", line.strip())
            yield from (part.strip() for part in command.split(" && ") if part.strip())
    spans = [" ".join(span.split()) for span in IN_TEXT.findall(FENCED.sub("", text))]
    # What is logged may begin with kvtier, too.
    yield from (span for span in spans if not span.startswith("kvtier ") or span.split()[1] in whole().commands)


def problems(line: str) -> list[str]:
    """What of a command line is not there."""
    words = shlex.split(line.partition(" > ")[0].partition(" | ")[0])
    match words:
        case ["docker-compose", *rest]:
            found = _of_compose(rest)
        case ["make", *rest]:
            known = names_in("Makefile", r"^([\w-]+):") | names_in("Makefile", r"\$\((\w+)\)")
            names = [word.partition("=")[0] for word in rest if "=" in word or word.islower()]
            found = [f"no {name}" for name in names if name not in known]
        case ["pip", "install", *rest]:
            found = [f"an index has no {word}" for word in rest if word.startswith("kvtier")]
            asked = [name for word in rest if word.startswith(".[") for name in word[2:-1].split(",")]
            found += [f"no extra {name}" for name in asked if name not in extras()]
        case ["python" | "python3", *rest]:
            found = _of_python(rest)
        case ["kvtier", command, *_] if command in whole().commands or command.startswith("-"):
            found = _of_kvtier(words[1:])
        case _:
            found = []
    found += [problem for option, word in pairwise(words) for problem in _of_plug_in(option, word)]
    return [f"{line}: {problem}" for problem in found]


def _of_kvtier(words: list[str]) -> list[str]:
    command, context = whole(), typer.Context(whole())
    while isinstance(command, TyperGroup) and words and not words[0].startswith("-"):
        if PLACEHOLDER.fullmatch(words[0]):
            return []
        try:
            _, command, words = command.resolve_command(context, words)
        except Exception as error:
            return [str(error)]
        context = typer.Context(command, parent=context)
    known = {option for param in command.params for option in (*param.opts, *param.secondary_opts)} | {"-h", "--help"}
    named = [word.partition("=")[0].rstrip(",") for word in words if re.match(r"--?[a-z]", word)]
    return [f"no option {name}" for name in named if name not in known]


def _of_compose(words: list[str]) -> list[str]:
    services = names_in("docker-compose.yml", r"^  (\w+):$")
    match words:
        case ["exec", service, *command]:
            return ([] if service in services else [f"no service {service}"]) + problems(shlex.join(command))
        case ["--profile", profile, *rest]:
            profiles = names_in("docker-compose.yml", r"profiles: \[(\w+)\]")
            return ([] if profile in profiles else [f"no profile {profile}"]) + _of_compose(rest)
        case ["up", *rest]:
            return [f"no service {word}" for word in rest if word.islower() and word[0] != "-" and word not in services]
    return []


def _of_python(words: list[str]) -> list[str]:
    match words:
        case ["-c", program]:
            ast.parse(program)
        case ["-m", module, *rest] if module.startswith("kvtier"):
            spec = importlib.util.find_spec(module)
            if spec is None or spec.origin is None:
                return [f"no module {module}"]
            sources = "".join(path.read_text() for path in Path(spec.origin).parent.glob("*.py"))
            options = re.findall(r"--[a-z-]+", " ".join(rest))
            return [f"no option {option}" for option in options if f'"{option}"' not in sources]
        case [script, *_] if script.endswith(".py") and not (ROOT / script).exists():
            return [f"no file {script}"]
    return []


def _of_plug_in(option: str, value: str) -> list[str]:
    """What engines are given to find their plug-in by."""
    if option == "--kv-transfer-config":
        settings = json.loads(value)
        module, name = settings["kv_connector_module_path"], settings["kv_connector"]
    elif option == "--hicache-storage-backend-extra-config":
        settings = json.loads(value)
        module, name = settings["module_path"], settings["class_name"]
    else:
        return []
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return [f"no module {module}"]
    return [] if f'"{name}"' in Path(spec.origin).read_text() else [f"no {name} in {module}"]


@page_of_each
def test_command_lines_are_there(page: Path) -> None:
    assert [problem for line in command_lines(page.read_text()) for problem in problems(line)] == []


@page_of_each
def test_scripts_are_marked_as_such_and_can_be_read_by_a_shell(page: Path) -> None:
    text = page.read_text()
    unmarked = [line for _, mark, body in FENCED.findall(text) if not mark for line in body.splitlines()]
    indented = [line for line in FENCED.sub("", text).splitlines() if line.startswith("    ")]
    assert [line for line in [*unmarked, *indented] if STARTS.match(line)] == []
    for script in scripts(text):
        read = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, timeout=20)
        assert read.returncode == 0, read.stderr


@pytest.mark.parametrize(("engine", "page"), [("vllm serve", "vllm.md"), ("sglang.launch_server", "sglang.md")])
def test_the_readme_starts_engines_as_their_pages_do(engine: str, page: str) -> None:
    commands = [
        next(line for line in command_lines((ROOT / file).read_text()) if engine in line and "config" in line)
        for file in ("README.md", f"docs/{page}")
    ]
    mine, theirs = (["".join(word.split()) for word in shlex.split(command)] for command in commands)
    assert mine == theirs


def test_the_library_does_what_the_readme_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    names: dict[str, object] = {}
    exec(program.replace("/tmp/kvtier-blocks", str(tmp_path)), names)
    assert capsys.readouterr().out.count("Status.HIT") == 4
    names["tier"].close()  # type: ignore[attr-defined]


def test_what_is_not_there_is_found() -> None:
    text = "Type `kvtier stats --colour` or\n```sh\nkvtier pool brew  # tea\nA=1 kvtier size M \\\n  --x=1\n```"
    lines = list(command_lines(text))
    assert lines == ["kvtier pool brew", "kvtier size M    --x=1", "kvtier stats --colour"]
    more = (
        "docker-compose exec pool kvtier doctor --colour", "docker-compose exec tea ls", "docker-compose up -d tea",
        "docker-compose --profile tea up -d", "make tea", "make gpu TEA_ARGS=1", "pip install 'kvtier[engine]'",
        "pip install '.[tea]'", "python -m kvtier_bench.tea", "python -m kvtier_bench.gpu.resources --tea",
        "python3 tools/tea.py", "python -m sglang.launch_server --hicache-storage-backend-extra-config "
        """'{"module_path": "kvtier_sglang", "class_name": "Tea"}'""",
    )  # fmt: skip
    assert [len(problems(line)) for line in (*lines, *more)] == [1] * (len(lines) + len(more))
    assert not problems("kvtier bench flood --rounds 3 --json")
    assert not problems("make gpu GPU_ARGS=--second")
