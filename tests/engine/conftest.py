"""An engine on the real model, and a client of it, for the tests of a module."""

from collections.abc import Iterator

import openai
import pytest

from engine_process import EngineProcess, engine_process, official_client


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    # One thread: tests ask for little, and several threads wait for each other on a busy machine.
    with engine_process(tmp_path_factory.mktemp("engine"), KVTIER__ENGINE__NUM_THREADS="1") as running:
        yield running


@pytest.fixture(scope="module")
def official(engine: EngineProcess) -> Iterator[openai.OpenAI]:
    """OpenAI's own client."""
    with official_client(str(engine.client.base_url)) as client:
        yield client
