"""Containers take minutes and a Docker engine: these tests run when they are asked for, and then never skip."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from compose_rig import Stack, build_image

ASKED_FOR = "KVTIER_TEST_COMPOSE"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get(ASKED_FOR) == "1":
        return
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=f"needs a Docker engine: set {ASKED_FOR}=1"))


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The pool's image, built from this checkout. It keeps its tag, so that the next build finds its layers."""
    return build_image(tmp_path_factory.mktemp("build"))


@pytest.fixture(scope="module")
def shared_stack(image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Pool and Redis as `docker-compose up -d` starts them for a single tenant; all of it gone at the end."""
    with Stack(image, tmp_path_factory.mktemp("stack")) as running:
        yield running


@pytest.fixture
def stack(shared_stack: Stack) -> Stack:
    """Both running, whatever the test before has left."""
    if not shared_stack.runs():
        shared_stack.up()
    return shared_stack
