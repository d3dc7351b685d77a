"""Figures about this repository's code: `python tools/figures.py [--json] [CHECKOUT]`.

Lines are lines of `.py` files, and docstrings those of modules, classes, functions and fields. One counts as a
reference if it begins with where to read, or says only what else it calls or implements. One counts as a fragment if it
begins with a word that seldom begins a whole sentence: a preposition, or a pronoun for what the code beside it names;
or if a later sentence of it begins with one of those that never do so here.
"""

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

PRODUCT = ("kvtier", "kernels", "services", "connectors", "benchmarks", "tools")
TIERS = ("kvtier/tiers", "kvtier/store", "services/kvtier_pool", "kvtier/offload", "kvtier/hierarchy")
"""Tiers, the store, their processes, and what joins them. Folders that a checkout does not have count nothing."""
_PREPOSITIONS = (
    "After|Among|As|At|Because|Before|Behind|Beside|Between|Beyond|By|During|For|From|In|Like|Of|On|Over|"
    "Since|To|Under|Until|While|With|Within|Without"
)
_FRAGMENT = re.compile(
    rf"({_PREPOSITIONS}|Also|And|But|Else|Ditto|Likewise|Nor|Not|Or|So|The same|Those|Where|Who|Whoever|Whose)\b|"
    r".*[.:;?!] (Of|Those|Who|Whose|Likewise|Nor|Ditto)\b"
)
_REFERENCE = re.compile(r"See\b|As `|(Calls|Implements|Overrides|Likewise) `[^`]+`\.?$")


def modules(checkout: Path, folders: Sequence[str]) -> Iterator[Path]:
    """All modules below these folders but generated ones, in no order."""
    for folder in folders:
        yield from (path for path in (checkout / folder).rglob("*.py") if "_pb2" not in path.name)


def lines(checkout: Path, folders: Sequence[str]) -> int:
    """Lines of these folders' modules."""
    return sum(len(path.read_text().splitlines()) for path in modules(checkout, folders))


def docstrings(module: Path) -> Iterator[str]:
    """Every string that stands as a statement: of modules, classes, functions and fields."""
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield " ".join(node.value.value.split())


def figures(checkout: Path) -> dict[str, int]:
    """The figures by name."""
    said = [text for module in modules(checkout, PRODUCT) for text in docstrings(module)]
    return {
        "product lines": lines(checkout, PRODUCT),
        "lines of tiers, store and their processes": lines(checkout, TIERS),
        "lines of tests": lines(checkout, ("tests",)),
        "modules": len(list(modules(checkout, PRODUCT))),
        "docstrings": len(said),
        "docstrings that only refer": sum(bool(_REFERENCE.match(text)) for text in said),
        "docstrings that are fragments": sum(bool(_FRAGMENT.match(text)) for text in said),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", nargs="?", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    found = figures(options.checkout)
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        for name, number in found.items():
            print(f"{number:>8,}  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
