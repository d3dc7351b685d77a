"""What a launcher would launch on a GPU, for tests: see `kvtier_kernels_bench.compiling`."""

from kvtier_kernels_bench.compiling import (
    SHARED_LIMIT_BYTES,
    Launch,
    Usage,
    compile_launch,
    recorded,
    usage_of,
)

__all__ = ["SHARED_LIMIT_BYTES", "Launch", "Usage", "compile_launch", "recorded", "usage_of"]
