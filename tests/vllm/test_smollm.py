"""A real model, once: SmolLM2-135M and a document of 3,000 tokens, read by one engine and asked about in another."""

import contextlib
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from engine_lab import Lab
from vllm_rig import BLOCK, ENVIRON, cached_of, settings, tokens_of, transfer

from cache_pool import CachePool
from kvtier_engine.demo.demo_model import demo_model_path
from kvtier_engine.model.gguf_import import import_gguf

LONG = {"max_model_len": 3200, "max_num_batched_tokens": 3200}
DOCUMENT = [(7 * i * i + 3 * i) % 40_000 + 100 for i in range(3000)]
EXAMPLE = Path(__file__).parents[2] / "examples" / "vllm_two_engines.py"
FIRST, SECOND = [*DOCUMENT, *range(1000, 1009)], [*DOCUMENT, *range(2000, 2020)]


@pytest.fixture(scope="module")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return import_gguf(demo_model_path(), tmp_path_factory.mktemp("models"))


def test_a_long_document_is_computed_once(lab: Lab, smollm: Path, pool: CachePool) -> None:
    connector = transfer(settings(pool={"address": pool.address}, host={"capacity_bytes": "512MiB"}))
    with lab.engine(connector, model=smollm, **LONG) as engine:
        engine.generate([FIRST], num_tokens=8)
        pool.await_written(len(DOCUMENT) // BLOCK)
        expected = engine.generate([SECOND], num_tokens=8, salt="computed")
    with lab.engine(connector, model=smollm, **LONG) as engine:
        answers = engine.generate([SECOND], num_tokens=8)
    assert tokens_of(answers) == tokens_of(expected)
    assert cached_of(expected) == [0]
    assert cached_of(answers) == [len(DOCUMENT) // BLOCK * BLOCK]


def test_the_example_shares_a_document_whatever_listens_here(smollm: Path) -> None:
    command, environ = [sys.executable, str(EXAMPLE)], {**os.environ, **ENVIRON, "VLLM_CPU_KVCACHE_SPACE": "1"}
    told = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert (told.returncode, "MODEL_FOLDER" in told.stderr) == (1, True)
    with socket.socket() as other:
        with contextlib.suppress(OSError):  # it is taken, by somebody else or here
            other.bind(("127.0.0.1", 7602))
            other.listen()
        done = subprocess.run([*command, str(smollm)], env=environ, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    cached = re.findall(r"^(\d+) of (\d+) tokens from the cache", done.stdout, flags=re.MULTILINE)
    (first, _), (second, whole) = cached
    assert int(first) == 0
    assert int(second) > int(whole) - 64, "all but the question"
