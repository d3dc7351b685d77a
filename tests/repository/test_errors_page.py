"""docs/errors.md names every line that our code logs as a warning or an error, and no other one."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "errors.md"
LEVELS = {"warn", "warning", "error", "exception", "critical"}
FORMAT = re.compile(r"%(?:\.\d+)?[sdfgr]|%,d")
ROW = re.compile(r"^\| `(?P<line>[^`]*)` \| (?P<remedy>.+) \|$", re.MULTILINE)


def templates() -> dict[str, str]:
    """Lines with `…` in place of what is filled in, and where each of them is logged."""
    return {line: place for path in modules() for line, place in logged_by(path)}


def modules() -> list[Path]:
    """Product code: what runs in an engine or a pool of somebody."""
    found = [path for part in ("kvtier", "services", "connectors") for path in (ROOT / part).rglob("*.py")]
    return sorted(
        path for path in found if "testing" not in path.parts and "build" not in path.relative_to(ROOT).parts[:1]
    )


def logged_by(path: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in LEVELS
            and node.args
            and (line := template(node.args[0])) is not None
        ):
            yield line, f"{path.relative_to(ROOT)}:{node.lineno}"


def template(message: ast.expr) -> str | None:
    """None: what is logged is made elsewhere, or is nothing but what is filled in."""
    if isinstance(message, ast.Constant) and isinstance(message.value, str):
        line = FORMAT.sub("…", message.value)
    elif isinstance(message, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else "…" for part in message.values]
        line = "".join(str(part) for part in parts)
    else:
        return None
    line = line.replace("`", "'").replace("|", "/")
    return line if re.search("[a-z]", line) else None


def test_the_page_has_every_line_that_is_logged() -> None:
    logged, told = templates(), {match["line"]: match["remedy"] for match in ROW.finditer(PAGE.read_text())}
    missing = {line: place for line, place in logged.items() if line not in told}
    assert not missing, "docs/errors.md has to say what these mean, and what to do"
    assert not told.keys() - logged.keys(), "nobody logs these lines of docs/errors.md any more"
    assert all(len(remedy) > 30 for remedy in told.values())
