"""One part, in a process of its own: `python -m kvtier_kernels_bench.child PART ROWS SECONDS [--tiny]`.

So a part that breaks the device's context, or hangs, takes no other part with it. Rows are appended to the file ROWS
as they are known, so a part that is killed loses only what it was measuring.
"""

import argparse
import faulthandler
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from kvtier.bench.report import Case
from kvtier.clock import MONOTONIC
from kvtier_kernels_bench.parts import GRACE_S
from kvtier_kernels_bench.rows import pack


def rows_of(part: str, budget_s: float, *, tiny: bool) -> Iterator[Case]:
    """Rows of a part as they become known. Raises whatever it raises."""
    begin = MONOTONIC()
    if part == "checks":  # they are processes of their own: the device is left to those
        from kvtier_kernels_bench import part_checks

        return part_checks.measure(budget_s)
    # Importing torch takes seconds, which are the part's.
    from kvtier_kernels_bench.setting import Setting

    return _measure(part)(Setting.here(budget_s - (MONOTONIC() - begin), tiny=tiny))


def _measure(part: str) -> Callable[..., Iterator[Case]]:
    """Imported one by one: what a part does not need may be missing."""
    match part:
        case "copies" | "host-copies":
            from kvtier_kernels_bench import part_copies

            return part_copies.on_device if part == "copies" else part_copies.to_host
        case "prefill":
            from kvtier_kernels_bench import part_prefill

            return part_prefill.measure
        case "decode" | "shared-decode":
            from kvtier_kernels_bench import part_decode

            return part_decode.plain if part == "decode" else part_decode.shared
        case "decode-step":
            from kvtier_kernels_bench import part_step

            return part_step.measure
        case "spill":
            from kvtier_kernels_bench import part_spill

            return part_spill.measure
        case "layers":
            from kvtier_kernels_bench import part_layers

            return part_layers.measure
        case "ttft":
            from kvtier_kernels_bench import part_ttft

            return part_ttft.measure
        case "sweep":
            from kvtier_kernels_bench import part_sweep

            return part_sweep.measure
    raise ValueError(f"no part is called {part!r}")


def main(arguments: list[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part")
    parser.add_argument("rows", type=Path)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    # Shortly before it is killed, it says where it hangs.
    faulthandler.dump_traceback_later(options.seconds + GRACE_S / 2)
    with options.rows.open("a") as file:
        for case in rows_of(options.part, options.seconds, tiny=options.tiny):
            file.write(pack(case) + "\n")
            file.flush()
    faulthandler.cancel_dump_traceback_later()
    return 0


if __name__ == "__main__":
    sys.exit(main())
