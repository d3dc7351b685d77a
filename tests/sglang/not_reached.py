"""What SGLang imports and no test reaches: import this before SGLang, and none of it has to be installed.

Its configurations of models for pictures import torchvision, whose wheel wants CUDA; its test kit imports the client of
its benchmarks, with the data sets of all, for a class of test cases of which the kit's trees use nothing.
"""

import os
import sys
import types
import unittest
from unittest import mock

from transformers.utils import is_torchvision_available

# Where SGLang's page hash is compiled to; elsewhere it would be in the home of whoever runs this.
os.environ["TORCH_EXTENSIONS_DIR"] = os.path.join(sys.prefix, "torch_extensions")

# Asked first: transformers remembers the answer, and leaves alone what is put in its place now.
assert not is_torchvision_available()
for _name in ("torchvision", "torchvision.transforms", "torchvision.transforms.functional"):
    sys.modules[_name] = mock.MagicMock(name=_name, __spec__=None)

_cases = types.ModuleType("sglang.test.test_utils")
_cases.CustomTestCase = unittest.TestCase  # type: ignore[attr-defined]
sys.modules[_cases.__name__] = _cases
