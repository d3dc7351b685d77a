"""Tests whose kernels run in Triton's interpreter: only in a process started with TRITON_INTERPRET=1.

Triton decides for or against its interpreter when a kernel's module is imported, so these tests cannot share a process
with those that compile. `tests/kernels/test_interpreted.py` gives them their own.
"""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    import interpreter_rig

    interpreter_rig.install()
else:
    collect_ignore_glob = ["test_*.py"]
