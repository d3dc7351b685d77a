"""`python -m kvtier_kernels.selfcheck [SHARE OF]`: the exit status is 1 if any kernel is wrong."""

import sys

from kvtier_kernels.selfcheck.command import main

if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:3])))
