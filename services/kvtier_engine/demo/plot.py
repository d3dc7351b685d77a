"""Time to first token per run, as an SVG bar chart."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

_BAR, _GAP, _LEFT, _WIDTH = 30, 16, 250, 860
_COLOURS = {"device": "#2a9d8f", "host": "#43aa8b", "pool": "#277da1", "": "#e76f51"}


def write_plot(path: Path, rows: Sequence[tuple[str, float, int, str]], *, title: str, caption: str) -> None:
    """Writes the chart.

    :param rows: per run its name, TTFT in seconds, cached tokens, and the tier most of them came from
        (empty: computed).
    """
    longest = max(seconds for _, seconds, _, _ in rows)
    scale = (_WIDTH - _LEFT - 230) / longest
    height = 70 + len(rows) * (_BAR + _GAP) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="20" y="34" font-size="19" font-weight="bold" fill="#222">{escape(title)}</text>',
    ]
    for index, (name, seconds, cached, tier) in enumerate(rows):
        y = 60 + index * (_BAR + _GAP)
        width = max(2.0, seconds * scale)
        middle = y + _BAR / 2 + 5
        source = f"{cached:,} tokens from {tier}" if tier else "computed"
        parts += [
            f'<text x="{_LEFT - 12}" y="{middle}" font-size="15" text-anchor="end" fill="#222">{escape(name)}</text>',
            f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_BAR}" rx="3" fill="{_COLOURS[tier]}"/>',
            f'<text x="{_LEFT + width + 8:.1f}" y="{middle}" font-size="14" fill="#444">'
            f"{seconds * 1000:,.0f} ms, {escape(source)}</text>",
        ]
    parts += [f'<text x="20" y="{height - 14}" font-size="12" fill="#777">{escape(caption)}</text>', "</svg>"]
    path.write_text("\n".join(parts) + "\n")
