"""One part, in a process of its own: `python -m kvtier_bench.gpu.run.child PART JOURNAL SECONDS [--tiny] [--plant]`.

So a part that breaks the device's context, or hangs, takes no other part with it. Rows are appended to the journal
as they are known, so a part that is killed loses only what it was measuring.
"""

import argparse
import faulthandler
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

from kvtier.clock import MONOTONIC
from kvtier_bench.gpu.measuring.rows import failure
from kvtier_bench.gpu.run.journal import Journal
from kvtier_bench.gpu.run.parts import GRACE_S, part_of
from kvtier_bench.measuring.report import Case


def rows_of(part: str, budget_s: float, *, tiny: bool) -> Iterator[Case]:
    """Rows of a part as they become known. Raises whatever it raises."""
    begin = MONOTONIC()
    # Importing torch takes seconds, which are the part's. What a part does not need may be missing.
    from kvtier_bench.gpu.measuring.setting import Setting

    chosen = part_of(part)
    module = importlib.import_module(f"kvtier_bench.gpu.{chosen.module}")
    # Parts of other processes leave the device to these.
    setting = Setting.here(budget_s - (MONOTONIC() - begin), tiny=tiny)
    rows: Iterator[Case] = getattr(module, chosen.function)(setting)
    return rows


def main(arguments: list[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part")
    parser.add_argument("journal", type=Path)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--plant", action="store_true")
    options = parser.parse_args(arguments)
    journal = Journal(options.journal)
    # Shortly before it is killed, it says where it hangs.
    faulthandler.dump_traceback_later(options.seconds + GRACE_S / 2)
    try:
        if options.plant:
            from kvtier_bench.gpu.plants import plant

            plant(options.part)
        return _measure(journal, options.part, options.seconds, tiny=options.tiny)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _measure(journal: Journal, part: str, seconds: float, *, tiny: bool) -> int:
    from kvtier_bench.gpu.measuring.comparing import WrongResultError

    try:
        for case in rows_of(part, seconds, tiny=tiny):
            journal.row(part, case)
    except WrongResultError as error:
        journal.row(part, failure(part, "results", str(error)))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
