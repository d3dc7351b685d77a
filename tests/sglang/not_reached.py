"""What SGLang imports and no test reaches: import this before SGLang, and none of it has to be installed.

Its test kit imports the client of its benchmarks, with the data sets of all, for a class of test cases of which the
kit's trees use nothing.
"""

import os
import sys
import types
import unittest

from kvtier_bench.sglang import absent_torchvision  # noqa: F401  (before SGLang)

# Where SGLang's page hash is compiled to; elsewhere it would be in the home of whoever runs this.
os.environ["TORCH_EXTENSIONS_DIR"] = os.path.join(sys.prefix, "torch_extensions")

_cases = types.ModuleType("sglang.test.test_utils")
_cases.CustomTestCase = unittest.TestCase  # type: ignore[attr-defined]
sys.modules[_cases.__name__] = _cases
