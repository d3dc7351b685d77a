"""Horizontal bars as a picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from kvtier.cli.canvas import INK, PALE, Box, Shape, Text, draw

_WIDTH, _LEFT, _RIGHT = 940, 230, 250
_BAR, _GAP, _TOP, _BOTTOM = 22, 8, 58, 40
_COLOURS = (
    *("#2a9d8f", "#277da1", "#e9c46a", "#e76f51", "#8e6bbf", "#43aa8b", "#577590"),
    *("#b56576", "#90a955", "#bc6c25", "#6d6875", "#0a9396", "#9a031e"),
)


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar."""

    name: str
    """Left of it."""
    value: float
    text: str
    """Right of it: the value in words."""
    group: str = ""
    """Bars of a group have a colour of their own."""
    scale: str = ""
    """The longest bar of a scale fills the width."""
    heading: str = ""
    """The text above the first of the bars in a row that share it."""


def write_bars(path: Path, bars: Sequence[Bar], *, title: str, caption: str) -> None:
    """Writes the picture.

    :param path: one that `require_drawable` lets pass.
    :param caption: below the bars, e.g. the hardware.
    """
    shapes, height = _shapes(bars, title, caption)
    draw(path, shapes, _WIDTH, height)


def _shapes(bars: Sequence[Bar], title: str, caption: str) -> tuple[list[Shape], int]:
    colours = {group: _COLOURS[i % len(_COLOURS)] for i, group in enumerate(dict.fromkeys(b.group for b in bars))}
    longest: dict[str, float] = {}
    for bar in bars:
        longest[bar.scale] = max(longest.get(bar.scale, 0.0), bar.value)
    shapes: list[Shape] = [Text(20, 34, title, 19, INK)]
    y = _TOP
    for heading, together in groupby(bars, key=lambda bar: bar.heading):
        if heading:
            shapes.append(Text(_LEFT, y + 14, heading, 14, PALE))
            y += _BAR
        for bar in together:
            width = max(2.0, bar.value / (longest[bar.scale] or 1.0) * (_WIDTH - _LEFT - _RIGHT))
            baseline = y + _BAR / 2 + 5
            shapes += [
                Text(_LEFT - 12, baseline, bar.name, 14, INK, from_right=True),
                Box(_LEFT, y, width, _BAR, colours[bar.group]),
                Text(_LEFT + width + 8, baseline, bar.text, 13, INK),
            ]
            y += _BAR + _GAP
        y += 2 * _GAP
    shapes.append(Text(20, y + _BOTTOM - 24, caption, 12, PALE))
    return shapes, y + _BOTTOM
