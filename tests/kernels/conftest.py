"""Which chips kernels are compiled for: all that tests name, or those in the variable `KVTIER_TEST_CHIPS`."""

import os

import pytest

CHIPS = {int(chip) for chip in os.environ.get("KVTIER_TEST_CHIPS", "").split()}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Each Triton compiles for some of the chips in `make test-triton`."""
    left_out = [item for item in items if CHIPS and _chip(item) not in (None, *CHIPS)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def _chip(item: pytest.Item) -> int | None:
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    chip = parameters.get("chip")
    return chip if isinstance(chip, int) else None
