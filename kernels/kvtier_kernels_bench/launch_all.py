"""`python -m kvtier_kernels_bench.launch_all SECONDS`: every kernel once or more, small, each result compared.

For tools that watch what kernels do, under which everything takes a hundred times as long. A line for each check;
those for which the time does not suffice are left out.
"""

import sys

import torch

from kvtier.clock import MONOTONIC
from kvtier_kernels.selfcheck import run_checks

_LONGEST = 130
"""Keys of the longest sequence: more than a tile of any kernel, and no multiple of one."""


def main(seconds: float) -> int:
    """The exit status."""
    deadline, num_failed = MONOTONIC() + seconds, 0
    for name, failure in run_checks(torch.device("cuda", torch.cuda.current_device()), longest=_LONGEST):
        print(f"{'FAILED' if failure else 'ok'} {name} {failure}", flush=True)
        num_failed += bool(failure)
        if MONOTONIC() > deadline:
            break
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1])))
