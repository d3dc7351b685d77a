"""`python -m kvtier_bench.gpu.resources`: what every kernel takes of a chip, without one.

Compiles every launcher's kernels ahead of time, as it would launch them, for each chip: registers, shared memory, bytes
spilled, products on tensor cores, how many programs fit a multiprocessor. Needs triton and no GPU. About 2 s per kernel
and chip, from triton's cache none.
"""

import argparse
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import triton

from kvtier_bench.gpu.resources import resource_table
from kvtier_bench.gpu.resources.compiling import SHARED_LIMIT_BYTES, Resources, resources_of
from kvtier_bench.gpu.resources.configurations import configurations

CHIPS = (80, 90, 100)


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
                found.append(resources_of(launch, chip, configuration.name, default=configuration.default))
                if done is not None:
                    done(found[-1])
    return found


def line(of: Resources) -> str:
    """A row of the table."""
    spilled = f"{of.spilled_bytes:,} spilled" if of.spilled_bytes else ""
    return (
        f"sm_{of.chip:<4}{of.kernel:<18}{of.configuration:<48}{of.tile:<16}{of.registers:>4} registers"
        f"{of.shared_bytes:>9,} of {of.shared_limit_bytes:,} shared  {of.num_warps:>2} warps  {of.products:<12}"
        f"{of.programs_per_multiprocessor:>3} at a time  {spilled}"
    ).rstrip()


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 1 when a default configuration spills or does not fit its chip."""
    parser = argparse.ArgumentParser(prog="python -m kvtier_bench.gpu.resources", description=__doc__)
    parser.add_argument("--chip", type=int, action="append", choices=sorted(SHARED_LIMIT_BYTES), help="e.g. 90")
    parser.add_argument("--candidates", type=int, default=0, help="other tiles beside each default of attention")
    parser.add_argument("--only", default="", help="configurations in whose name this regular expression is found")
    parser.add_argument("--write", type=Path, help=f"all defaults into this page, {resource_table.PATH}: nothing else")
    parser.add_argument("--json", type=Path, help="also write all of it there")
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1: kernels are interpreted in this process, not compiled")
    if options.write is not None and (options.chip or options.candidates or options.only):
        parser.error("--write: takes all defaults for all chips; leave out --chip, --candidates and --only")
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
    if options.write is not None:
        page = options.write.read_text() if options.write.exists() else ""
        options.write.write_text(resource_table.with_section(page, triton.__version__, found))
    bad = [of for of in found if of.default and of.is_too_much]
    for of in bad:
        print(f"FAILED {line(of)}")
    return 1 if bad else 0
