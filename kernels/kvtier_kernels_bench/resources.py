"""`python -m kvtier_kernels_bench.resources`: what every kernel takes of a chip, without one.

Compiles every launcher's kernels ahead of time, as it would launch them, for each chip: registers, shared memory, bytes
spilled. Needs triton and no GPU. About 2 s per kernel and chip, from triton's cache none.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import triton

from kvtier_kernels_bench.candidates import label
from kvtier_kernels_bench.compiling import SHARED_LIMIT_BYTES, Launch, compile_launch, usage_of
from kvtier_kernels_bench.configurations import Configuration, configurations

CHIPS = (80, 90, 100)


@dataclass(frozen=True, slots=True)
class Resources:
    """What one kernel takes."""

    kernel: str
    configuration: str
    default: bool
    chip: int
    """Compute capability, e.g. 90."""
    registers: int
    """Of a thread."""
    shared_bytes: int
    """Of a program."""
    shared_limit_bytes: int
    spilled_bytes: int
    """Of a thread."""
    num_warps: int


def resources(
    chips: Sequence[int] = CHIPS,
    *,
    candidates: int = 0,
    only: str = "",
    done: Callable[[Resources], None] | None = None,
) -> list[Resources]:
    """Compiles, chip by chip, all configurations in whose names the regular expression `only` is found.

    :param done: called with each as it is known.
    """
    found: list[Resources] = []
    for chip in chips:
        for configuration in configurations(candidates=candidates):
            if not re.search(only, configuration.name):
                continue
            for launch in configuration.record(chip):
                found.append(_compiled(configuration, launch, chip))
                if done is not None:
                    done(found[-1])
    return found


def _compiled(configuration: Configuration, launch: Launch, chip: int) -> Resources:
    kernel = compile_launch(launch, chip)
    usage = usage_of(kernel)
    name = configuration.name
    if "ROWS" in launch.arguments and "KEYS" in launch.arguments:
        name = f"{name} {label(launch.tile)}"
    return Resources(
        kernel=launch.name,
        configuration=name,
        default=configuration.default,
        chip=chip,
        registers=usage.registers,
        shared_bytes=kernel.metadata.shared,
        shared_limit_bytes=SHARED_LIMIT_BYTES[chip],
        spilled_bytes=usage.spilled_bytes,
        num_warps=kernel.metadata.num_warps,
    )


def line(of: Resources) -> str:
    """A row of the table."""
    spilled = f"{of.spilled_bytes:,} spilled" if of.spilled_bytes else ""
    return (
        f"sm_{of.chip:<4}{of.kernel:<24}{of.configuration:<58}{of.registers:>4} registers"
        f"{of.shared_bytes:>9,} of {of.shared_limit_bytes:,} shared  {of.num_warps:>2} warps  {spilled}"
    ).rstrip()


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 1 when a default configuration spills or does not fit its chip."""
    parser = argparse.ArgumentParser(prog="python -m kvtier_kernels_bench.resources", description=__doc__)
    parser.add_argument("--chip", type=int, action="append", choices=sorted(SHARED_LIMIT_BYTES), help="e.g. 90")
    parser.add_argument("--candidates", type=int, default=0, help="other tiles beside each default of attention")
    parser.add_argument("--only", default="", help="configurations in whose name this regular expression is found")
    parser.add_argument("--json", type=Path, help="also write all of it there")
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1: kernels are interpreted in this process, not compiled")
    print(f"triton {triton.__version__}, ahead of time: nothing of this ran", flush=True)
    found = resources(
        options.chip or CHIPS,
        candidates=options.candidates,
        only=options.only,
        done=lambda of: print(line(of), flush=True),
    )
    if options.json is not None:
        content = {"triton": triton.__version__, "kernels": [asdict(of) for of in found]}
        options.json.write_text(json.dumps(content, indent=2) + "\n")
    bad = [of for of in found if of.default and (of.spilled_bytes or of.shared_bytes > of.shared_limit_bytes)]
    for of in bad:
        print(f"FAILED {line(of)}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
