"""`python -m kvtier_bench.gpu.parts.warm_up`: compiles and launches one trivial kernel on the GPU.

Then torch's libraries and the compiler are in the page cache, and Triton has built its stub of the driver: processes
that begin side by side would each read and build all of it.
"""

import sys

import torch
import triton
import triton.language as tl


@triton.jit
def _add_one(number):  # type: ignore[no-untyped-def]
    tl.store(number, tl.load(number) + 1)


def main() -> int:
    """The exit status: 0 when the kernel has computed what it should."""
    number = torch.zeros(1, dtype=torch.int32, device="cuda")
    _add_one[(1,)](number)
    return 0 if number.item() == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
