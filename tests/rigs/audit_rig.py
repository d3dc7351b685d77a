"""What an audit log has written."""

import json
from pathlib import Path
from typing import Any


def lines(path: Path) -> list[dict[str, Any]]:
    """The lines of the file, in order."""
    return [json.loads(line) for line in path.read_text().splitlines()]
