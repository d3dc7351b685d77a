"""What the demo has seen, as a picture."""

import textwrap
from pathlib import Path

from kvtier.cli.canvas import INK, PALE, Box, Shape, Text, draw
from kvtier_engine.demo.report import SOURCES, facts, speed_up
from kvtier_engine.demo.story import Story

_WIDTH = 940
_LEFT = 206
"""The distance of bars from the left, in pixels."""
_BAR, _STEP = 20, 27
_LONGEST = 450
_COLOURS = {"": "#e76f51", "computed": "#e76f51", "pool": "#277da1", "host": "#e9a23b", "device": "#2a9d8f"}
_CHARACTERS = 102
"""The most characters in a line of facts."""


def draw_story(path: Path, story: Story, caption: str) -> None:
    """Writes the picture to a file that ends in .svg or .png."""
    shapes: list[Shape] = []
    y = _paths(shapes, story, 34)
    y = _turns(shapes, story, y + 30)
    y = _facts(shapes, story, y + 30)
    shapes.append(Text(20, y + 18, caption, 12, PALE))
    draw(path, shapes, _WIDTH, round(y + 36))


def _paths(shapes: list[Shape], story: Story, y: float) -> float:
    shapes.append(Text(20, y, f"Time to first token of a prompt of {story.prompt_tokens:,} tokens", 18))
    y += 16
    longest = max(path.ttft_s for path in story.paths)
    for path in story.paths:
        width = max(2.0, path.ttft_s / longest * _LONGEST)
        label = f"{path.ttft_s * 1000:,.0f} ms"
        if faster := speed_up(story, path.ttft_s):
            label += f", {faster}"
        shapes += [
            Text(_LEFT - 12, y + 15, path.name, 14, from_right=True),
            Box(_LEFT, y, width, _BAR, _COLOURS[path.tier]),
            Text(_LEFT + width + 8, y + 15, label, 13),
        ]
        y += _STEP
    return y


def _turns(shapes: list[Shape], story: Story, y: float) -> float:
    shapes.append(Text(20, y, "A conversation over two engines in turn: where each prompt's tokens were", 18))
    y += 16
    longest = max(turn.answer.prompt_tokens for turn in story.turns)
    for number, turn in enumerate(story.turns, 1):
        x: float = _LEFT
        words = []
        for source in reversed(SOURCES):
            if count := turn.tokens_by_source.get(source, 0):
                width = count / longest * _LONGEST
                shapes.append(Box(x, y, width, _BAR, _COLOURS[source]))
                x += width
                words.append(f"{count} {source}")
        shapes.append(Text(_LEFT - 12, y + 15, f"turn {number}, engine {turn.engine}", 14, from_right=True))
        shapes.append(Text(x + 8, y + 15, ", ".join(words), 13))
        y += _STEP
    return y


def _facts(shapes: list[Shape], story: Story, y: float) -> float:
    shapes.append(Text(20, y, "What happens when", 18))
    y += 24
    for name, text in facts(story):
        shapes.append(Text(_LEFT - 12, y, name, 13, from_right=True))
        for line in textwrap.wrap(text, _CHARACTERS):
            shapes.append(Text(_LEFT, y, line, 13, INK))
            y += 18
        y += 4
    return y
