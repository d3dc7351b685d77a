"""Prints what the pool's image needs of a pyproject.toml, one per line, for `pip install -r`: the base dependencies,
and what tenants with storage keys need."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
print("\n".join([*project["dependencies"], *project["optional-dependencies"]["seal"]]))
