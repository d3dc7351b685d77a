"""Engines that share a cache pool: a cold start hits everything, and who differs in anything never meets."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import tiny_llama
from engine_lab import Lab
from vllm_rig import (
    BLOCK,
    NUM_TOKENS,
    TOKENS,
    Answer,
    all_hit,
    cached_of,
    continued,
    make_prompts,
    none_hit,
    num_blocks,
    settings,
    tokens_of,
    transfer,
)

from cache_pool import CachePool, until

PROMPTS = make_prompts()


@pytest.fixture(scope="module")
def filled_pool(lab: Lab, expected: list[Answer], tmp_path_factory: pytest.TempPathFactory) -> Iterator[CachePool]:
    """Has what tenant red's engine computed for `PROMPTS`: plainly, and with the salt `one`."""
    with CachePool(tmp_path_factory.mktemp("pool"), TOKENS) as pool:
        with lab.engine(_sharing(pool)) as engine:
            assert tokens_of(engine.generate(PROMPTS)) == tokens_of(expected)
            salted = engine.generate(PROMPTS, salt="one")
            assert tokens_of(salted) == tokens_of(expected)
            assert cached_of(salted) == none_hit(PROMPTS), "it met what has no salt"
        assert pool.num_written() == 2 * num_blocks(PROMPTS)
        yield pool


def _sharing(pool: CachePool, tenant: str = "red") -> dict[str, object]:
    return transfer(settings(tenant, pool={"address": [pool.address]}))


@pytest.mark.parametrize("processes", [False, True], ids=["in process", "processes"])
def test_a_cold_start_hits_everything(
    lab: Lab, expected: list[Answer], filled_pool: CachePool, processes: bool
) -> None:
    num_read = filled_pool.num_read()
    with lab.engine(_sharing(filled_pool), processes=processes) as engine:
        answers = engine.generate(PROMPTS)
        assert tokens_of(answers) == tokens_of(expected)
        assert cached_of(answers) == all_hit(PROMPTS)
        turns = continued(PROMPTS, expected, NUM_TOKENS)
        assert cached_of(engine.generate(turns, num_tokens=1)) == all_hit(turns)
        for salt, hits in (("one", all_hit(PROMPTS)), (f"new, {processes}", none_hit(PROMPTS))):
            answers = engine.generate(PROMPTS, salt=salt)
            assert tokens_of(answers) == tokens_of(expected)
            assert cached_of(answers) == hits
    assert filled_pool.num_read() - num_read >= 2 * sum(all_hit(PROMPTS)) // BLOCK


def test_blocks_come_from_where_they_lie(lab: Lab, expected: list[Answer], filled_pool: CachePool) -> None:
    """Once vLLM's process has mapped the pool's memory, it reads nothing by way of host memory any more."""
    with lab.engine(_sharing(filled_pool)) as engine:

        def answers_right() -> None:
            engine.reset(connector=True)
            answers = engine.generate(PROMPTS)
            assert tokens_of(answers) == tokens_of(expected)
            assert cached_of(answers) == all_hit(PROMPTS)

        def is_mapped() -> bool:
            answers_right()
            return any("kvtier-slab" in each.path for each in psutil.Process(engine.pid).memory_maps())

        until(is_mapped, "vLLM's process maps the pool's memory")
        answers_right()


def test_tenants_never_meet(lab: Lab, expected: list[Answer], filled_pool: CachePool) -> None:
    """Not even two with the same secret, prompts and salts."""
    num_read = filled_pool.num_read()
    with lab.engine(_sharing(filled_pool, "blue")) as engine:
        for salt in (None, "one"):
            answers = engine.generate(PROMPTS, salt=salt)
            assert tokens_of(answers) == tokens_of(expected)
            assert cached_of(answers) == none_hit(PROMPTS)
    assert filled_pool.num_read() == num_read


def test_the_same_weights_at_another_path_meet(
    lab: Lab, expected: list[Answer], filled_pool: CachePool, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "copy"
    shutil.copytree(lab.model, elsewhere)
    with lab.engine(_sharing(filled_pool), model=elsewhere) as engine:
        answers = engine.generate(PROMPTS)
    assert tokens_of(answers) == tokens_of(expected)
    assert cached_of(answers) == all_hit(PROMPTS)


def test_new_weights_at_the_same_path_never_meet_the_old(
    lab: Lab, expected: list[Answer], pool: CachePool, tmp_path: Path
) -> None:
    """The new file has the size of the old one, and its time, as copying tools set it."""
    model = tmp_path / "model"
    tiny_llama.make(model, seed=0)
    with lab.engine(_sharing(pool), model=model) as engine:
        assert tokens_of(engine.generate(PROMPTS)) == tokens_of(expected)
    assert pool.num_written() == num_blocks(PROMPTS)

    weights = model / "model.safetensors"
    before = weights.stat()
    tiny_llama.make(model, seed=1)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = weights.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)

    with lab.engine(model=model) as engine:
        new = engine.generate(PROMPTS)
    assert all(one != other for one, other in zip(tokens_of(new), tokens_of(expected), strict=True))
    with lab.engine(_sharing(pool), model=model) as engine:
        answers = engine.generate(PROMPTS)
    assert tokens_of(answers) == tokens_of(new)
    assert cached_of(answers) == none_hit(PROMPTS)
    assert pool.num_read() == 0


def test_more_than_host_memory_holds_goes_to_the_pool(lab: Lab, expected: list[Answer], pool: CachePool) -> None:
    """A step may fill more blocks than can be saved at a time: the others wait on the device."""
    connector = transfer(settings(pool={"address": pool.address}, host={"capacity_bytes": "1MiB"}))
    with lab.engine(connector) as engine:
        assert tokens_of(engine.generate(PROMPTS)) == tokens_of(expected)

        def stored() -> bool:
            engine.generate(make_prompts(1, first_length=8, seed=1), num_tokens=2)  # steps, and no block of its own
            return pool.num_written() == num_blocks(PROMPTS)

        until(stored, "all blocks are in the pool")
