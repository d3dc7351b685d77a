"""`python -m kvtier_bench.gpu.parts.launch_all DEADLINE`: every kernel once or more, each result compared.

A line for each check as it begins and as it ends, one of each kernel first, then another one. Checks that would begin
after the deadline, a time of the monotonic clock, are left out: under tools that watch what kernels do, everything
takes a hundred times as long. In a process started with TRITON_INTERPRET=1, kernels are interpreted on the CPU.
"""

import argparse
import importlib
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from kvtier.clock import MONOTONIC
from kvtier_kernels.selfcheck.command import all_checks, failure_of
from kvtier_kernels.selfcheck.copies import Check

SMALL = 130
"""Keys of the longest sequence: more than a tile of any kernel, and no multiple of one."""


def main(arguments: Sequence[str]) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("deadline", type=float)
    parser.add_argument("--longest", type=int, default=SMALL, help="keys of the longest sequence")
    parser.add_argument("--share", type=int, nargs=2, default=(0, 1), help="every n-th check from this one on")
    parser.add_argument("--once", action="store_true", help="one check of each kernel")
    parser.add_argument("--most", type=int, help="so many checks at most")
    parser.add_argument("--plant", default="", help="as the part of this name has it planted")
    options = parser.parse_args(arguments)
    if options.plant:
        from kvtier_bench.gpu.plants import plant

        plant(options.plant)
    turns = _by_turns(all_checks(_device(), options.longest))
    chosen = [(name, check) for turn, name, check in turns if not (options.once and turn)][: options.most]
    share, num_shares = options.share
    return _run(chosen[share::num_shares], options.deadline)


def _run(checks: Sequence[tuple[str, Check]], deadline: float) -> int:
    num_failed = 0
    for number, (name, check) in enumerate(checks):
        if MONOTONIC() > deadline:
            print(f"left out {len(checks) - number} checks of {len(checks)}", flush=True)
            break
        print(f"begin {name}", flush=True)
        failure = failure_of(check)
        print(f"{'FAILED' if failure else 'ok'} {name} {failure}", flush=True)
        num_failed += bool(failure)
    return 1 if num_failed else 0


def _device() -> torch.device:
    if os.environ.get("TRITON_INTERPRET") != "1":
        return torch.device("cuda", torch.cuda.current_device())
    # The rig is the checkout's tests': as it comes, the interpreter computes otherwise than a GPU.
    importlib.import_module("interpreter_rig").install()
    return torch.device("cpu")


def _by_turns(checks: Iterable[tuple[str, Check]]) -> list[tuple[int, str, Check]]:
    """One of each kernel, by the first word of its name, then another of each. With the number of its turn."""
    num_before: Counter[str] = Counter()
    turns = []
    for name, check in checks:
        kernel = name.split()[0]
        turns.append((num_before[kernel], name, check))
        num_before[kernel] += 1
    return sorted(turns, key=lambda turn: turn[0])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
