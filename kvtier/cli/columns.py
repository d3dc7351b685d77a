"""Figures in columns as wide as what is in them: nothing is cut, at any width of a terminal and in a pipe."""

from collections.abc import Iterable, Sequence

_GAP = "  "


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
