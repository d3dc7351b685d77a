"""Runs looks beside each other, and waits for none of them longer than there is time."""

import queue
import threading
from collections.abc import Sequence

from kvtier.cli.doctor.lines import Level, Line, Look
from kvtier.clock import MONOTONIC
from kvtier.errors import KvtierError


def run_looks(looks: Sequence[Look], deadline: float) -> tuple[list[Line], bool]:
    """Returns the lines of all looks in their order, and whether all have ended. One that has not is a problem.

    :param deadline: monotonic. Threads of looks that have not ended then go on, as daemons.
    """
    answers: queue.SimpleQueue[tuple[int, list[Line]]] = queue.SimpleQueue()

    def run(number: int) -> None:
        answers.put((number, _lines_of(looks[number])))

    for number, look in enumerate(looks):
        threading.Thread(target=run, args=(number,), name=f"kvtier-doctor-{look.subject}", daemon=True).start()
    found: dict[int, list[Line]] = {}
    while len(found) < len(looks):
        try:
            number, lines = answers.get(timeout=max(0.0, deadline - MONOTONIC()))
        except queue.Empty:
            break
        found[number] = lines
    all_lines = [line for i, look in enumerate(looks) for line in found.get(i, [_without_end(look)])]
    return all_lines, len(found) == len(looks)


def _lines_of(look: Look) -> list[Line]:
    lines: list[Line] = []
    try:
        lines.extend(look.run())
    except (KvtierError, OSError) as error:
        lines.append(Line(Level.PROBLEM, look.subject, str(error)))
    except Exception as error:  # a look that fails must not hide what the others find
        text = f"this look has failed itself: {type(error).__name__}: {error}"
        lines.append(Line(Level.WARNING, look.subject, text, remedy="please report it"))
    return lines


def _without_end(look: Look) -> Line:
    return Line(
        Level.PROBLEM,
        look.subject,
        "it has not answered in the time that this command takes",
        "whoever uses it waits as long, or leaves it alone after its own deadline",
        "look for a disk, a file system of a network or a driver that hangs",
    )
