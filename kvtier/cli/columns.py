"""Figures in columns as wide as what is in them: nothing is cut, at any width of a terminal and in a pipe."""

import shutil
from collections.abc import Iterable, Sequence

_GAP = "  "
_LEAST_TEXT = 30


def aligned(titles: Sequence[str], rows: Iterable[Sequence[str]], *, num_words: int = 1) -> list[str]:
    """Lines of a table, its titles first.

    :param num_words: the first columns are words, and to the left; the others are figures, and to the right.
    """
    table = [titles, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(titles))]
    return [
        _GAP.join(
            cell.ljust(width) if column < num_words else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]


def text_width(most: int) -> int:
    """How many characters a line of a text has: fewer than `most` on a terminal that is narrower."""
    columns = shutil.get_terminal_size((most + 1, 0)).columns
    return max(_LEAST_TEXT, min(most, columns - 1))
