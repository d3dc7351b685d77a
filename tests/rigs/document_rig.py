"""Examples in the documentation: bytes in hexadecimal, taken out of their page to be run."""

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
_FENCE = re.compile(r"^```hex (.+)\n((?:.*\n)*?)```$", re.MULTILINE)
_REPEATED = re.compile(r"([0-9a-f]{2})\*(\d+)")


def examples(page: str) -> dict[str, bytes]:
    """The bytes of each example of a page, by its name: of every line, what stands before two spaces."""
    found: dict[str, bytes] = {}
    for name, text in _FENCE.findall((DOCS / page).read_text()):
        assert name not in found, f"docs/{page} has two examples {name!r}"
        digits = "".join(line.strip().partition("  ")[0] for line in text.splitlines())
        repeated = _REPEATED.sub(lambda match: match[1] * int(match[2]), digits)
        found[name] = bytes.fromhex(repeated)
    return found
