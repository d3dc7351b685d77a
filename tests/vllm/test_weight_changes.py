"""Weights that change while vLLM runs: their KV never goes by the keys of others, and no other KV is used with them.

vLLM on the CPU does not sleep, but its workers are told to; what they would lose is tested in `test_weight_hooks.py`.
"""

import itertools
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_llama
import weights_by_wire
from engine_lab import Engine, Lab
from safetensors.torch import load_file, save_file
from vllm_rig import (
    Adapter,
    Answer,
    all_hit,
    cached_of,
    make_prompts,
    none_hit,
    num_blocks,
    settings,
    tokens_of,
    transfer,
)

from cache_pool import CachePool, until

PROMPTS, LATER = make_prompts(), make_prompts(seed=2)
WIRE = {"weight_transfer_config": {"backend": weights_by_wire.BACKEND}}
EMBEDDING = "model.embed_tokens.weight"
LORA, SEEDS = {"enable_lora": True, "max_lora_rank": 8}, (1, 2)
SAYS_SO = "nobody can tell which weights"


@pytest.fixture(scope="module")
def other(lab: Lab) -> Path:
    """A model of other weights."""
    tiny_llama.make(lab.home / "other", seed=1)
    return lab.home / "other"


@pytest.fixture(scope="module")
def embeds_otherwise(lab: Lab, other: Path) -> Path:
    """A model with one weight of the other's, which vLLM on the CPU keeps as it is loaded."""
    folder = Path(shutil.copytree(lab.model, lab.home / "embeds"))
    weights = load_file(folder / "model.safetensors")
    weights[EMBEDDING] = load_file(other / "model.safetensors")[EMBEDDING]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def of_embeds(lab: Lab, embeds_otherwise: Path) -> tuple[list[Answer], list[Answer]]:
    """What it answers to `PROMPTS` and to `LATER`."""
    with lab.engine(model=embeds_otherwise) as engine:
        return engine.generate(PROMPTS), engine.generate(LATER)


@pytest.fixture(scope="module")
def of_other(lab: Lab, other: Path) -> tuple[list[Answer], list[Answer]]:
    """What it answers to `PROMPTS` and to `LATER`."""
    with lab.engine(model=other) as engine:
        return engine.generate(PROMPTS), engine.generate(LATER)


@pytest.fixture(scope="module")
def of_first(lab: Lab) -> list[Answer]:
    """What the model of the lab answers to `LATER`."""
    with lab.engine() as engine:
        return engine.generate(LATER)


def _answers(
    engine: Engine, prompts: Sequence[Sequence[int]], expected: Sequence[Answer], hits: Callable[..., list[int]]
) -> None:
    """The engine's own cache is empty before, as those who change weights have to see to."""
    engine.reset()
    answers = engine.generate(prompts)
    assert tokens_of(answers) == tokens_of(expected)
    assert cached_of(answers) == hits(prompts)


def _heard(engine: Engine) -> None:
    """The scheduler has heard of the change: it does so with the results of a step."""
    engine.generate(make_prompts(1, first_length=8, seed=9), num_tokens=2)


@pytest.mark.parametrize(("tier", "processes"), [("host", False), ("disk", False), ("pool", False), ("pool", True)])
def test_reloaded_weights_have_keys_of_their_own(
    lab: Lab,
    pool: CachePool,
    expected: list[Answer],
    other: Path,
    of_other: tuple[list[Answer], list[Answer]],
    of_first: list[Answer],
    tmp_path: Path,
    tier: str,
    processes: bool,
) -> None:
    tables: dict[str, dict[str, dict[str, Any]]] = {
        "host": {},
        "disk": {"disk": {"directory": str(tmp_path), "reserve_bytes": 0}},
        "pool": {"pool": {"address": [pool.address]}},
    }
    connector = transfer(settings(**tables[tier]))
    with lab.engine(connector, processes=processes) as engine:
        _answers(engine, PROMPTS, expected, none_hit)
        engine.reload_weights(other)
        _heard(engine)
        _answers(engine, PROMPTS, of_other[0], none_hit)
        _answers(engine, LATER, of_other[1], none_hit)
        _answers(engine, PROMPTS, of_other[0], all_hit)
        engine.reload_weights(lab.model)
        _heard(engine)
        _answers(engine, PROMPTS, expected, all_hit)
        _answers(engine, LATER, of_first, none_hit)
    if tier == "host":
        return
    with lab.engine(connector) as engine:  # another one, which finds what that one has left
        _answers(engine, PROMPTS, expected, all_hit)
        _answers(engine, LATER, of_first, all_hit)
        engine.reload_weights(other)
        _heard(engine)
        _answers(engine, LATER, of_other[1], all_hit)


def test_all_ranks_notice(lab: Lab, pool: CachePool, other: Path) -> None:
    connector = transfer(settings(pool={"address": [pool.address]}))
    models = (lab.model, other, lab.model)
    with lab.engine() as engine:
        wanted = []
        for model in models:
            engine.reload_weights(model)
            engine.reset()
            wanted.append(engine.generate(PROMPTS))
        engine.restart(connector, tensor_parallel_size=2, distributed_executor_backend="mp")
        for model, answers, hits in zip(models, wanted, (none_hit, none_hit, all_hit), strict=True):
            engine.reload_weights(model)
            _heard(engine)
            _answers(engine, PROMPTS, answers, hits)
    assert pool.num_written() == 2 * 2 * num_blocks(PROMPTS)


def test_requests_that_wait_while_weights_change_have_new_keys(
    lab: Lab, other: Path, of_other: tuple[list[Answer], list[Answer]]
) -> None:
    """The scheduler has made their keys before it hears of the change: the first step tells it.

    What that step computed is of the new weights, and is kept, too.
    """
    with lab.engine(transfer(settings()), max_num_seqs=1) as engine:
        engine.reload_weights(other)
        _answers(engine, PROMPTS, of_other[0], none_hit)
        _answers(engine, PROMPTS, of_other[0], all_hit)


def test_the_same_weights_again_change_nothing(lab: Lab, pool: CachePool, expected: list[Answer]) -> None:
    with lab.engine(transfer(settings(pool={"address": [pool.address]}))) as engine:
        _answers(engine, PROMPTS, expected, none_hit)
        for path in (None, Path(shutil.copytree(lab.model, lab.home / "copy"))):
            engine.reload_weights(path)
            _heard(engine)
            _answers(engine, PROMPTS, expected, all_hit)
        assert SAYS_SO not in engine.output()
    assert pool.num_written() == num_blocks(PROMPTS)


def _by_wire(engine: Engine, model: Path) -> None:
    engine.call_workers("start_weight_update")
    engine.call_workers("update_weights", update_info={"path": str(model / "model.safetensors")})
    engine.call_workers("finish_weight_update")


def _past_vllm(engine: Engine, model: Path) -> None:
    engine.load_past_vllm(model, EMBEDDING)


def _asleep(engine: Engine, model: Path) -> None:
    """As if what sleep takes away had come back as other weights: on the CPU it takes nothing."""
    engine.sleep(2)
    _past_vllm(engine, model)


@pytest.mark.parametrize("change", [_by_wire, _past_vllm, _asleep])
def test_nothing_is_read_or_kept_while_weights_are_unknown(
    lab: Lab,
    pool: CachePool,
    expected: list[Answer],
    embeds_otherwise: Path,
    of_embeds: tuple[list[Answer], list[Answer]],
    change: Callable[[Engine, Path], None],
) -> None:
    connector = transfer(settings(pool={"address": [pool.address]}))
    with lab.engine(connector, **WIRE) as engine:
        _answers(engine, PROMPTS, expected, none_hit)
        pool.await_written(num_blocks(PROMPTS))
        for heard in (False, True):
            change(engine, embeds_otherwise)
            if heard:
                _heard(engine)
            for prompts, answers in zip((PROMPTS, LATER), of_embeds, strict=True):
                _answers(engine, prompts, answers, none_hit)
        assert engine.output().count(SAYS_SO) == 1
        assert engine.counter("vllm:kvtier_weight_changes") >= 1
        engine.reload_weights(lab.model)
        _heard(engine)
        _answers(engine, PROMPTS, expected, all_hit)
    assert pool.num_written() == num_blocks(PROMPTS)


def test_a_light_sleep_changes_nothing(lab: Lab, expected: list[Answer]) -> None:
    with lab.engine(transfer(settings())) as engine:
        _answers(engine, PROMPTS, expected, none_hit)
        engine.sleep(1)
        _heard(engine)
        _answers(engine, PROMPTS, expected, none_hit)  # vLLM has reset the connector
        _answers(engine, PROMPTS, expected, all_hit)
        assert SAYS_SO not in engine.output()


def test_an_engine_that_starts_in_the_same_process_changes_nothing(
    lab: Lab, expected: list[Answer], other: Path
) -> None:
    """vLLM would have this one's connector copy its blocks."""
    with lab.engine(transfer(settings()), own_process=True) as engine:
        _answers(engine, PROMPTS, expected, none_hit)
        assert "cannot serve both" in engine.start_beside(other)
        _answers(engine, PROMPTS, expected, all_hit)
        assert SAYS_SO not in engine.output()


def _await_hits(engine: Engine, adapter: Path, expected: Sequence[Answer]) -> None:
    """Nothing is kept before the adapter's content is known."""

    def all_are() -> bool:
        engine.reset()
        answers = engine.generate(PROMPTS, adapter=adapter)
        assert tokens_of(answers) == tokens_of(expected)
        return cached_of(answers) == all_hit(PROMPTS)

    until(all_are, "prompts with the adapter are kept")


@pytest.fixture(scope="module")
def adapters(lab: Lab) -> tuple[list[Answer], list[Answer]]:
    """What is answered to `PROMPTS` with adapters of two seeds."""
    for seed in SEEDS:
        tiny_llama.make_adapter(lab.home / f"seed-{seed}", seed=seed)
    with lab.engine(**LORA) as engine:
        one, two = (engine.generate(PROMPTS, adapter=lab.home / f"seed-{seed}") for seed in SEEDS)
    return one, two


@pytest.mark.parametrize("is_moved", [False, True], ids=["the same path", "another path"])
def test_an_adapter_loaded_in_place_of_another_has_keys_of_its_own(
    lab: Lab, pool: CachePool, adapters: tuple[list[Answer], list[Answer]], tmp_path: Path, is_moved: bool
) -> None:
    adapter, path = tmp_path / "adapter", tmp_path / ("moved" if is_moved else "adapter")
    one, two = adapters
    tiny_llama.make_adapter(adapter, seed=SEEDS[0])
    connector = transfer(settings(pool={"address": [pool.address]}))
    with lab.engine(connector, **LORA) as engine:
        _await_hits(engine, adapter, one)
        tiny_llama.make_adapter(path, seed=SEEDS[1])
        engine.load_adapter(adapter, path)
        _await_hits(engine, path, two)
    with lab.engine(connector, **LORA) as engine:  # another one finds what belongs to each
        for seed, answers in zip(SEEDS, adapters, strict=True):
            _await_hits(engine, lab.home / f"seed-{seed}", answers)


def test_an_adapter_is_what_was_loaded_not_what_has_come_into_its_folder(
    lab: Lab, pool: CachePool, adapters: tuple[list[Answer], list[Answer]], tmp_path: Path
) -> None:
    adapter = tmp_path / "adapter"
    tiny_llama.make_adapter(adapter, seed=SEEDS[0])
    connector = transfer(settings(pool={"address": [pool.address]}))
    with lab.engine(connector, **LORA) as engine:
        engine.load_adapter(adapter, adapter)
        tiny_llama.make_adapter(adapter, seed=SEEDS[1])
        for _ in range(5):
            engine.reset()
            answers = engine.generate(PROMPTS, adapter=adapter)
            assert (tokens_of(answers), cached_of(answers)) == (tokens_of(adapters[0]), none_hit(PROMPTS))
            time.sleep(0.1)
    with lab.engine(connector, **LORA) as engine:
        _await_hits(engine, lab.home / f"seed-{SEEDS[1]}", adapters[1])


def _await_kept(engine: Engine, adapter: Adapter, expected: Sequence[Answer]) -> None:
    """What is computed with the adapter is kept, and vLLM's own cache is not emptied before.

    vLLM's own answers are right from the moment that the adapter's content is known, and then they are kept.
    """
    numbers = itertools.count()

    def is_kept() -> bool:
        engine.generate(PROMPTS, adapter=adapter)
        # vLLM's own cache has nothing under a new name.
        answers = engine.generate(PROMPTS, adapter=adapter._replace(name=f"name-{next(numbers)}"))
        assert tokens_of(answers) == tokens_of(expected)
        return cached_of(answers) == all_hit(PROMPTS)

    until(is_kept, "prompts with the adapter are kept")


@pytest.mark.parametrize("is_misnamed", [False, True], ids=["files have changed", "a request names other files"])
def test_adapters_of_one_name_and_path_never_meet(
    lab: Lab, pool: CachePool, adapters: tuple[list[Answer], list[Answer]], tmp_path: Path, is_misnamed: bool
) -> None:
    """vLLM takes them for one, whatever their ids: it finds KV of one on the device for the other."""
    adapter, elsewhere = tmp_path / "adapter", tmp_path / "elsewhere"
    tiny_llama.make_adapter(adapter, seed=SEEDS[0])
    tiny_llama.make_adapter(elsewhere, seed=SEEDS[1])
    connector = transfer(settings(pool={"address": [pool.address]}))
    with lab.engine(connector, **LORA, max_loras=4) as engine:
        _await_hits(engine, adapter, adapters[0])  # as number 1
        engine.reset()
        path = str(elsewhere if is_misnamed else adapter)
        one, two = Adapter("sql", 1, path), Adapter("sql", 2, path)
        answers = engine.generate(PROMPTS, adapter=one)
        assert tokens_of(answers) == tokens_of(adapters[0]), "vLLM computes with what it has loaded as number 1"
        if not is_misnamed:
            tiny_llama.make_adapter(adapter, seed=SEEDS[1])
        _await_kept(engine, two, adapters[1])
        assert tokens_of(engine.generate(PROMPTS, adapter=two)) == tokens_of(adapters[1])
    with lab.engine(connector, **LORA) as engine:  # another one finds what belongs to each
        for seed, answers in zip(SEEDS, adapters, strict=True):
            _await_hits(engine, lab.home / f"seed-{seed}", answers)
