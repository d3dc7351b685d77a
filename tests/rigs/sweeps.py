"""What `make soak-sweeps` runs in full, and `make test` in part."""

import os

IN_FULL = os.environ.get("KVTIER_TEST_SWEEPS") == "1"
