"""Horizontal bars as a picture: SVG by hand, PNG where Pillow is installed."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

from kvtier.errors import KvtierError

_WIDTH, _LEFT, _RIGHT = 940, 230, 250
_BAR, _GAP, _TOP, _BOTTOM = 22, 8, 58, 40
_INK, _PALE = "#222222", "#777777"
_COLOURS = (
    *("#2a9d8f", "#277da1", "#e9c46a", "#e76f51", "#8e6bbf", "#43aa8b", "#577590"),
    *("#b56576", "#90a955", "#bc6c25", "#6d6875", "#0a9396", "#9a031e"),
)
_SCALE = 2
"""Pixels of a PNG for each unit of the drawing."""


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


@dataclass(frozen=True, slots=True)
class _Box:
    x: float
    y: float
    width: float
    height: float
    colour: str


@dataclass(frozen=True, slots=True)
class _Text:
    x: float
    y: float
    """The vertical position of the text's baseline."""
    text: str
    size: int
    colour: str
    from_right: bool = False


_Shape = _Box | _Text


def require_drawable(path: Path) -> None:
    """Raises `KvtierError` when `write_bars` could not write such a file: ask before measuring for an hour."""
    suffix = path.suffix.lower()
    if suffix not in (".svg", ".png"):
        raise KvtierError(f"plot {path}: name a file that ends in .svg or .png")
    if suffix == ".png" and find_spec("PIL") is None:
        raise KvtierError(f"plot {path}: a .png needs Pillow (pip install pillow); a .svg needs nothing")


def write_bars(path: Path, bars: Sequence[Bar], *, title: str, caption: str) -> None:
    """Writes the picture.

    :param path: one that `require_drawable` lets pass.
    :param caption: below the bars, e.g. the hardware.
    """
    require_drawable(path)
    shapes, height = _shapes(bars, title, caption)
    draw = _draw_svg if path.suffix.lower() == ".svg" else _draw_png
    draw(path, shapes, height)


def _shapes(bars: Sequence[Bar], title: str, caption: str) -> tuple[list[_Shape], int]:
    colours = {group: _COLOURS[i % len(_COLOURS)] for i, group in enumerate(dict.fromkeys(b.group for b in bars))}
    longest: dict[str, float] = {}
    for bar in bars:
        longest[bar.scale] = max(longest.get(bar.scale, 0.0), bar.value)
    shapes: list[_Shape] = [_Text(20, 34, title, 19, _INK)]
    y = _TOP
    for heading, together in groupby(bars, key=lambda bar: bar.heading):
        if heading:
            shapes.append(_Text(_LEFT, y + 14, heading, 14, _PALE))
            y += _BAR
        for bar in together:
            width = max(2.0, bar.value / (longest[bar.scale] or 1.0) * (_WIDTH - _LEFT - _RIGHT))
            baseline = y + _BAR / 2 + 5
            shapes += [
                _Text(_LEFT - 12, baseline, bar.name, 14, _INK, from_right=True),
                _Box(_LEFT, y, width, _BAR, colours[bar.group]),
                _Text(_LEFT + width + 8, baseline, bar.text, 13, _INK),
            ]
            y += _BAR + _GAP
        y += 2 * _GAP
    shapes.append(_Text(20, y + _BOTTOM - 24, caption, 12, _PALE))
    return shapes, y + _BOTTOM


def _draw_svg(path: Path, shapes: Sequence[_Shape], height: int) -> None:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
    ]
    for shape in shapes:
        if isinstance(shape, _Box):
            parts.append(
                f'<rect x="{shape.x:.1f}" y="{shape.y:.1f}" width="{shape.width:.1f}" height="{shape.height:.1f}" '
                f'rx="3" fill="{shape.colour}"/>'
            )
        else:
            anchor = ' text-anchor="end"' if shape.from_right else ""
            parts.append(
                f'<text x="{shape.x:.1f}" y="{shape.y:.1f}" font-size="{shape.size}" fill="{shape.colour}"{anchor}>'
                f"{escape(shape.text)}</text>"
            )
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")


def _draw_png(path: Path, shapes: Sequence[_Shape], height: int) -> None:
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (_WIDTH * _SCALE, height * _SCALE), "white")
    draw = ImageDraw.Draw(image)
    for shape in shapes:
        x, y = shape.x * _SCALE, shape.y * _SCALE
        if isinstance(shape, _Box):
            corner = (x + shape.width * _SCALE, y + shape.height * _SCALE)
            draw.rounded_rectangle(((x, y), corner), radius=3 * _SCALE, fill=shape.colour)
        else:
            font = ImageFont.load_default(shape.size * _SCALE)
            draw.text((x, y), shape.text, fill=shape.colour, font=font, anchor="rs" if shape.from_right else "ls")
    image.save(path)
