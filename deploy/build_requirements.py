"""Prints what a pyproject.toml is built with, one requirement per line: what `make lock` locks for the build."""

import sys
import tomllib
from pathlib import Path

print("\n".join(tomllib.loads(Path(sys.argv[1]).read_text())["build-system"]["requires"]))
