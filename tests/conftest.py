"""Helper modules beside the tests are imported by name. No test and no module leaves anything behind."""

import contextlib
import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.testing.leaks import Holdings, leaving_no_shared_memory, require_nothing_beyond

_HERE = Path(__file__).parent
sys.path[:0] = [str(_HERE / folder) for folder in ("rigs", "soak", "fuzz")]

with contextlib.suppress(ModuleNotFoundError):  # environments of the plug-ins' tests are without it
    from hypothesis import settings

    # An example that took long says that the machine was busy.
    settings.register_profile("no deadline", settings.default, deadline=None)
    settings.load_profile("no deadline")

_failed = pytest.StashKey[bool]()


def pytest_collection_finish() -> None:
    """Modules and tests stay until the end: garbage collection, a tenth of the time, passes them by."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.failed:  # type: ignore[attr-defined]
        for node in item.listchain():
            node.stash[_failed] = True
    return report


@pytest.fixture(autouse=True, scope="module")
def _module_leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    before = Holdings.now()
    with leaving_no_shared_memory():
        yield
    if not request.node.stash.get(_failed, False):
        require_nothing_beyond(before)


@pytest.fixture(autouse=True)
def _test_leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Set up before and torn down after the other fixtures of the test; those of its module are there already.

    What a whole module shares, such as a server, may take on threads and connections during a test: such
    tests are left to the module's check.
    """
    before = Holdings.now()
    yield
    failed = request.node.stash.get(_failed, False)  # then its traceback holds what the test had
    if not failed and not _shares_fixtures(request.node):
        require_nothing_beyond(before)


def _shares_fixtures(item: pytest.Item) -> bool:
    """Whether the test uses a fixture of ours that outlives it."""
    ours = [found[-1] for found in item._fixtureinfo.name2fixturedefs.values() if found[-1].baseid]  # type: ignore[attr-defined]
    return any(fixture.scope != "function" and fixture.argname != _MODULE_CHECK for fixture in ours)


_MODULE_CHECK = _module_leaves_nothing_behind.__name__
