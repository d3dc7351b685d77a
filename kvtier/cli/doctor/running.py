"""Runs looks beside each other, and waits for none of them longer than there is patience."""

import os
import queue
import threading
from collections.abc import Sequence

from kvtier.cli.doctor.lines import Level, Line, Look
from kvtier.cli.doctor.patience import Patience
from kvtier.errors import KvtierError


def run_looks(looks: Sequence[Look], patience: Patience) -> tuple[list[list[Line]], bool]:
    """Returns the lines of each look, and whether all have ended. One that has not is a problem, behind what it has
    found until then.

    Threads of looks that have not ended go on, as daemons.
    """
    found: list[list[Line]] = [[] for _ in looks]
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()

    def run(number: int) -> None:
        _look(looks[number], found[number])
        ended.put(number)

    for number, look in enumerate(looks):
        threading.Thread(target=run, args=(number,), name=f"kvtier-doctor-{look.subject}", daemon=True).start()
    missing = set(range(len(looks)))
    while missing and (wait_s := patience.wait_s()):
        try:
            missing.discard(ended.get(timeout=wait_s))
        except queue.Empty:
            continue
    told = [list(lines) for lines in found]
    for number in missing:
        told[number].append(_hangs(looks[number]) if patience.is_blocked else _is_slow(looks[number]))
    return told, not missing


def _look(look: Look, lines: list[Line]) -> None:
    try:
        for line in look.run():
            lines.append(line)
    except (KvtierError, OSError) as error:
        lines.append(Line(Level.PROBLEM, look.subject, str(error)))
    except Exception as error:  # a look that fails must not hide what the others find
        text = f"this look has failed itself: {type(error).__name__}: {error}"
        lines.append(Line(Level.WARNING, look.subject, text, remedy="please report it"))


def _hangs(look: Look) -> Line:
    return Line(
        Level.PROBLEM,
        look.subject,
        "it has not answered in the time that this command takes",
        "whoever uses it waits as long, or leaves it alone after its own deadline",
        "look for a disk, a file system of a network or a driver that hangs",
    )


def _is_slow(look: Look) -> Line:
    return Line(
        Level.PROBLEM,
        look.subject,
        f"this look did not come to its end in time: {os.getloadavg()[0]:.1f} threads want the {os.cpu_count() or 1} "
        "cores of this host",
        "something may be wrong that is not told here",
        "run this again when the host has less to do, or give it more cores",
    )
