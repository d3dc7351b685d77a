"""Boxes and lines of text as a picture: SVG by hand, PNG where Pillow is installed."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.util import find_spec
from pathlib import Path

from kvtier.errors import KvtierError

INK, PALE = "#222222", "#777777"
_SCALE = 2
"""Pixels of a PNG for each unit of the drawing."""


@dataclass(frozen=True, slots=True)
class Box:
    """A filled rectangle. `y` grows downwards."""

    x: float
    y: float
    width: float
    height: float
    colour: str


@dataclass(frozen=True, slots=True)
class Text:
    """A line of text."""

    x: float
    y: float
    """The vertical position of the text's baseline."""
    text: str
    size: int
    colour: str = INK
    from_right: bool = False
    """Whether `x` is where the text ends."""


Shape = Box | Text


def require_drawable(path: Path) -> None:
    """Raises `KvtierError` when `draw` could not write such a file: ask before measuring for an hour."""
    suffix = path.suffix.lower()
    if suffix not in (".svg", ".png"):
        raise KvtierError(f"plot {path}: name a file that ends in .svg or .png")
    if suffix == ".png" and find_spec("PIL") is None:
        raise KvtierError(f"plot {path}: a .png needs Pillow (pip install pillow); a .svg needs nothing")


def draw(path: Path, shapes: Sequence[Shape], width: int, height: int) -> None:
    """Writes the shapes to a white picture, later ones over earlier ones.

    :param path: one that `require_drawable` lets pass.
    """
    require_drawable(path)
    write = _draw_svg if path.suffix.lower() == ".svg" else _draw_png
    write(path, shapes, width, height)


def _draw_svg(path: Path, shapes: Sequence[Shape], width: int, height: int) -> None:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for shape in shapes:
        if isinstance(shape, Box):
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


def _draw_png(path: Path, shapes: Sequence[Shape], width: int, height: int) -> None:
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (width * _SCALE, height * _SCALE), "white")
    draw = ImageDraw.Draw(image)
    for shape in shapes:
        x, y = shape.x * _SCALE, shape.y * _SCALE
        if isinstance(shape, Box):
            corner = (x + shape.width * _SCALE, y + shape.height * _SCALE)
            draw.rounded_rectangle(((x, y), corner), radius=3 * _SCALE, fill=shape.colour)
        else:
            font = ImageFont.load_default(shape.size * _SCALE)
            draw.text((x, y), shape.text, fill=shape.colour, font=font, anchor="rs" if shape.from_right else "ls")
    image.save(path)
