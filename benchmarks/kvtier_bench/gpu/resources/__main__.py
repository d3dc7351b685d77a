"""`python -m kvtier_bench.gpu.resources`: what every kernel takes of a chip, without one."""

import sys

from kvtier_bench.gpu.resources.command import main

if __name__ == "__main__":
    sys.exit(main())
