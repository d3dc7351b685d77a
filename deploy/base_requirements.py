"""Prints the base dependencies of a pyproject.toml, one per line, for `pip install -r`."""

import sys
import tomllib
from pathlib import Path

print("\n".join(tomllib.loads(Path(sys.argv[1]).read_text())["project"]["dependencies"]))
