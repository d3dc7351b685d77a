"""Import this before SGLang where torchvision is not installed: its configurations of models for pictures import it.

Its wheel wants CUDA. What has been put in its place is never called by anything that deals with KV.
"""

import importlib.util
import sys
from unittest import mock

from transformers.utils.import_utils import is_torchvision_available

if importlib.util.find_spec("torchvision") is None:
    # Asked first: transformers remembers the answer, and leaves alone what is put in its place now.
    is_torchvision_available()
    for _name in ("torchvision", "torchvision.transforms", "torchvision.transforms.functional"):
        sys.modules[_name] = mock.MagicMock(name=_name, __spec__=None)
