"""`docs/structure.md`: a line per module, from its own first sentence.

python tools/structure.py            what is missing or stale; exit status 1 if anything is
python tools/structure.py --write    writes the page
"""

import argparse
import ast
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "structure.md"
MARK = "<!-- What follows is written by `python tools/structure.py --write`. -->"


def packages() -> list[str]:
    """Folders of what the two wheels hold, in their order."""
    folders: list[str] = []
    for base in (ROOT, ROOT / "benchmarks"):
        project = tomllib.loads((base / "pyproject.toml").read_text())
        held = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
        folders += [str((base / folder).relative_to(ROOT)) for folder in held]
    return folders


def first_sentence(module: Path) -> str:
    """The first sentence of a module's docstring.

    :raises ValueError: the module has none.
    """
    docstring = ast.get_docstring(ast.parse(module.read_text()))
    if not docstring:
        raise ValueError(f"{module} has no docstring: say in one sentence what it is for")
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return paragraph if ". " not in paragraph else paragraph[: paragraph.index(". ") + 1]


def folders(package: Path) -> Iterator[Path]:
    """The package and its packages, each before those inside it, by name."""
    yield package
    for folder in sorted(path for path in package.iterdir() if (path / "__init__.py").exists()):
        yield from folders(folder)


def section(folder: Path) -> list[str]:
    """The lines about one package: what it is, then its modules by name."""
    modules = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py" and "_pb2" not in path.name)
    lines = [f"- `{module.name}`: {first_sentence(module)}" for module in modules]
    return [
        f"## `{folder.relative_to(ROOT)}`",
        "",
        first_sentence(folder / "__init__.py"),
        "",
        *lines,
        *([""] if lines else []),
    ]


def page() -> str:
    """The whole page: what is written by hand, then a section per package."""
    by_hand = PAGE.read_text().split(MARK)[0]
    lines = [line for package in packages() for folder in folders(ROOT / package) for line in section(folder)]
    return by_hand + MARK + "\n\n" + "\n".join(lines).rstrip() + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write docs/structure.md")
    wanted = page()
    if parser.parse_args(arguments).write:
        PAGE.write_text(wanted)
        return 0
    stale = set(PAGE.read_text().splitlines()) ^ set(wanted.splitlines())
    for line in sorted(stale):
        print(f"stale or missing in docs/structure.md: {line}", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
