"""Figures about this repository's code: `python tools/figures.py [--json] [CHECKOUT]`.

Lines are lines of `.py` files. A docstring counts as a fragment if it begins with a word that makes no sentence by
itself, and as a reference if all that it says is where to read.
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
_FRAGMENT = re.compile(r"(Of|Those|Who|Whose|Likewise|The same|By|As)\b")
_REFERENCE = re.compile(r"(See|Calls|Implements) `[^`]+`\.?$")


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
