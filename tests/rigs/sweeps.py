"""What `make soak-sweeps` and `make soak-kernels` run in full, and `make test` and `make test-triton` in part."""

import os

IN_FULL = os.environ.get("KVTIER_TEST_SWEEPS") == "1"
