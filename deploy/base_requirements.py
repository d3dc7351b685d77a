"""Prints what the pool's image needs of a pyproject.toml, one per line, for `pip install -r`: the base dependencies,
and those of the extras that are named after it."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
extras = [project["optional-dependencies"][extra] for extra in sys.argv[2:]]
print("\n".join(sum(extras, project["dependencies"])))
