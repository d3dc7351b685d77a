"""Real engines with another connector beside kvtier that loads: what the tiers hold at the end is what the model makes
of the tokens, and answers are those of an engine without any connector.

vLLM turns asynchronous scheduling off on the CPU; here it is turned on again. It is left off where a load within a
step fails: vLLM's own recovery does not survive that.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from engine_lab import Engine, Lab
from vllm_rig import (
    BLOCK,
    ENVIRON,
    NUM_TOKENS,
    Answer,
    all_hit,
    cached_of,
    continued,
    make_prompts,
    settings,
    tokens_of,
    transfer,
)

import disk_rig
from cache_pool import CachePool, until
from kvtier.identity.keys import BlockHasher, PrefixHasher, split_block_key, split_store_key, tenant_id

WORKER = "0-0"
LENDER = {"kv_connector": "LendingConnector", "kv_connector_module_path": "lending_connector", "kv_role": "kv_both"}
OURS, THEIRS = make_prompts(3), make_prompts(3, seed=1)
"""Prompts that kvtier alone deals with, and prompts whose KV the other connector has."""
ROOM = {"num_gpu_blocks_override": 40}
"""So few device blocks that `THEIRS` get some of `OURS`, and enough for them all to stay until their next turns."""
MODES = pytest.mark.parametrize("mode", [{}, {"async_scheduling": True}], ids=["plain", "asynchronous"])
Stored = dict[bytes, npt.NDArray[np.float32]]


@pytest.fixture(scope="module")
def answers(lab: Lab) -> tuple[list[Answer], list[Answer]]:
    """The answers of an engine without a connector to `OURS` and `THEIRS`."""
    with lab.engine(**ROOM) as engine:
        return engine.generate(OURS), engine.generate(THEIRS)


@pytest.fixture(scope="module")
def right(lab: Lab, answers: tuple[list[Answer], list[Answer]], tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """All blocks of prompts, answers and next turns, as kvtier alone saves them, each computed in the same way."""
    folder = tmp_path_factory.mktemp("right")
    with lab.engine(transfer(_settings(folder)), **ROOM) as engine:
        for prompts, expected in zip((OURS, THEIRS), answers, strict=True):
            assert tokens_of(engine.generate(prompts)) == tokens_of(expected)
            engine.generate(continued(prompts, expected, NUM_TOKENS), num_tokens=NUM_TOKENS)
            engine.reset()
    return stored(folder)


def stored(folder: Path) -> Stored:
    """All that a disk has, by chain hash."""
    return {
        split_store_key(key)[2]: np.frombuffer(path.read_bytes()[offset : offset + nbytes], dtype=np.float32)
        for key, (path, offset, nbytes) in disk_rig.places(folder / WORKER).items()
    }


def keys_of(tokens: Sequence[int]) -> list[bytes]:
    """Chain hashes of full blocks."""
    hasher = BlockHasher(tenant_id("red"), PrefixHasher(ENVIRON["KV_SECRET"].encode(), "", BLOCK))
    return [split_block_key(key)[1] for key in hasher.hash_blocks(tokens[: len(tokens) // BLOCK * BLOCK])]


def _settings(folder: Path, **tables: Any) -> dict[str, Any]:
    return settings(disk={"directory": str(folder), "reserve_bytes": 0}, **tables)


def _beside(folder: Path, **tables: Any) -> dict[str, Any]:
    """The other connector's offers go before ours."""
    extra = {"connectors": [LENDER, transfer(_settings(folder, **tables))]}
    whole = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    return whole | {"kv_connector_extra_config": extra}


def _lend(engine: Engine, expected: list[Answer]) -> None:
    """Has the other connector keep KV of `THEIRS`, in the engine's process."""
    answers = engine.generate(THEIRS, params={"lender": {"keep": True}})
    assert tokens_of(answers) == tokens_of(expected)
    engine.generate(make_prompts(1, first_length=8, seed=9), num_tokens=1)  # a step, in which it does so


def _require_right(found: Stored, right: Stored) -> None:
    assert found.keys() <= right.keys()
    for key, payload in found.items():
        np.testing.assert_allclose(payload, right[key], rtol=1e-3, atol=1e-3, err_msg="KV of something else")


@MODES
def test_loads_into_blocks_that_wait_to_be_saved(
    lab: Lab,
    answers: tuple[list[Answer], list[Answer]],
    right: Stored,
    pool: CachePool,
    tmp_path: Path,
    mode: dict[str, Any],
) -> None:
    """A pool that hangs holds up saves: most of what is computed waits on the device, and is overwritten there."""
    of_ours, of_theirs = answers
    lender = transfer({}) | LENDER
    with lab.engine(lender, **ROOM, **mode) as engine:
        _lend(engine, of_theirs)
        hasty = {"lookup_deadline_s": 0.2}
        tables = {"host": {"capacity_bytes": "1MiB"}, "pool": {"address": [pool.address]}, "cache": hasty}
        engine.restart(_beside(tmp_path, **tables), **ROOM, **mode)
        pool.suspend()
        assert tokens_of(engine.generate(OURS)) == tokens_of(of_ours)
        # Not saved themselves, they leave what waits there as it is.
        lent = engine.generate(THEIRS, params={"lender": {"loads": "between"}, "kvtier": {"no_store": True}})
        assert tokens_of(lent) == tokens_of(of_theirs)
        assert cached_of(lent) == all_hit(THEIRS)
        pool.resume()

        def all_saved() -> bool:
            engine.generate(make_prompts(1, first_length=8, seed=9), num_tokens=2)
            return engine.is_idle()

        until(all_saved, "what waited is saved")
        # The next turns find on the device what the other connector brought.
        turns = continued(THEIRS, of_theirs, NUM_TOKENS)
        engine.generate(turns, num_tokens=1)
        until(all_saved, "what was computed on top of it is saved")
    found = stored(tmp_path)
    _require_right(found, right)
    for prompt, turn, num_lent in zip(THEIRS, turns, all_hit(THEIRS), strict=True):
        theirs = set(keys_of(prompt[:num_lent]))
        assert not found.keys() & theirs, "what another connector brought was saved"
        assert found.keys() >= set(keys_of(turn)) - theirs, "what was computed on top of it was not saved"


@pytest.mark.parametrize("fails", [[], [0], [2, 5]], ids=str)
def test_loads_within_a_step(
    lab: Lab, answers: tuple[list[Answer], list[Answer]], right: Stored, tmp_path: Path, fails: list[int]
) -> None:
    """Where one fails, vLLM computes from there on again, and what it had computed on top of garbage is not saved."""
    _, of_theirs = answers
    with lab.engine(transfer({}) | LENDER, **ROOM) as engine:
        _lend(engine, of_theirs)
        engine.restart(_beside(tmp_path), **ROOM)
        lent = engine.generate(THEIRS, params={"lender": {"loads": "within", "fails": fails}})
        assert tokens_of(lent) == tokens_of(of_theirs)
    found = stored(tmp_path)
    _require_right(found, right)
    for prompt, num_lent in zip(THEIRS, all_hit(THEIRS), strict=True):
        num_theirs = min(fails, default=num_lent // BLOCK)
        keys = keys_of(prompt)
        assert not found.keys() & set(keys[:num_theirs])
        assert found.keys() >= set(keys[num_theirs:])


@MODES
def test_loads_between_steps_that_fail(
    lab: Lab, answers: tuple[list[Answer], list[Answer]], right: Stored, tmp_path: Path, mode: dict[str, Any]
) -> None:
    _, of_theirs = answers
    with lab.engine(transfer({}) | LENDER, **ROOM, **mode) as engine:
        _lend(engine, of_theirs)
        engine.restart(_beside(tmp_path), **ROOM, **mode)
        lent = engine.generate(THEIRS, params={"lender": {"loads": "between", "fails": [2, 5]}})
        assert tokens_of(lent) == tokens_of(of_theirs)
    found = stored(tmp_path)
    _require_right(found, right)
    for prompt in THEIRS:
        assert not found.keys() & set(keys_of(prompt)[:2])
        assert found.keys() >= set(keys_of(prompt)[2:])
