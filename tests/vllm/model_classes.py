"""What vLLM finds out about the class of a model before it makes one."""

from contextlib import AbstractContextManager
from unittest import mock


def found_out_here() -> AbstractContextManager[object]:
    """Meanwhile. Otherwise in a process that imports all of vLLM, so that no GPU is woken up: 7 s for each class.

    Imports vLLM when it is entered.
    """
    return mock.patch("vllm.model_executor.models.registry._run_in_subprocess", lambda find_out: find_out())
