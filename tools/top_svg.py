"""Draws what `kvtier top` shows of processes that run: `python tools/top_svg.py docs/top.svg SECONDS TOKEN URL...`."""

import io
import sys
import time
from pathlib import Path

from rich.console import Console

from kvtier.cli.stats.asking import Places
from kvtier.cli.top.cli import titled
from kvtier.cli.top.picture import Watch

_COLUMNS = 80
_FORMAT = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: monospace; font-size: {char_height}px; line-height: {line_height}px; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}<g class="{unique_id}-matrix" xml:space="preserve">{matrix}</g>
</g>
</svg>
"""
"""Rich's own has fonts from the network; a picture in a repository must not ask for any."""


def main() -> None:
    """Looks twice, and draws the second look."""
    output, seconds, token, *urls = sys.argv[1:]
    watch = Watch(Places(None, urls, None, token), float(seconds))
    watch.look()
    time.sleep(float(seconds))
    console = Console(record=True, width=_COLUMNS, file=io.StringIO(), force_terminal=True, highlight=False)
    console.print(titled(watch.look(), time.time(), f"every {seconds} s, q ends"))
    svg = console.export_svg(title="kvtier top", code_format=_FORMAT, unique_id="top")
    Path(output).write_text("".join(f"{line.rstrip()}\n" for line in svg.splitlines()))


if __name__ == "__main__":
    main()
