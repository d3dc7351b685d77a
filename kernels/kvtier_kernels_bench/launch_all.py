"""`python -m kvtier_kernels_bench.launch_all DEADLINE`: every kernel once or more, small, each result compared.

For tools that watch what kernels do, under which everything takes a hundred times as long. A line for each check, one
of each kernel first, then another one; those that would begin after the deadline, a time of the monotonic clock, are
left out.
"""

import sys
from collections import Counter
from collections.abc import Iterable

import torch

from kvtier.clock import MONOTONIC
from kvtier_kernels.selfcheck import all_checks, failure_of
from kvtier_kernels.selfcheck_copies import Check

_LONGEST = 130
"""Keys of the longest sequence: more than a tile of any kernel, and no multiple of one."""


def main(deadline: float) -> int:
    """The exit status."""
    num_failed = 0
    checks = _by_turns(all_checks(torch.device("cuda", torch.cuda.current_device()), _LONGEST))
    for number, (name, check) in enumerate(checks):
        if MONOTONIC() > deadline:
            print(f"left out {len(checks) - number} checks of {len(checks)}", flush=True)
            break
        failure = failure_of(check)
        print(f"{'FAILED' if failure else 'ok'} {name} {failure}", flush=True)
        num_failed += bool(failure)
    return 1 if num_failed else 0


def _by_turns(checks: Iterable[tuple[str, Check]]) -> list[tuple[str, Check]]:
    """One of each kernel, by the first word of its name, then another of each."""
    num_before: Counter[str] = Counter()
    turns = []
    for name, check in checks:
        kernel = name.split()[0]
        turns.append((num_before[kernel], name, check))
        num_before[kernel] += 1
    return [(name, check) for _, name, check in sorted(turns, key=lambda turn: turn[0])]


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1])))
