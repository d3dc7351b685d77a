"""Models with linear attention: of a prefix they need the KV of all blocks, and the states at its end."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tiny_qwen3_next
from engine_lab import Engine, Lab
from tiny_qwen3_next import BLOCK, NUM_STATE_GROUPS
from vllm_rig import (
    CROWD_TOKENS,
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

import disk_rig
from cache_pool import CachePool

PROMPTS = make_prompts(first_length=350)
FORK = [*PROMPTS[0][:200], *PROMPTS[1]]
"""Leaves another prompt behind two blocks of it, where vLLM has a state only if it keeps many."""
FEW = 5
"""Tokens: enough to see whether KV or a state is wrong."""
CROWD = make_prompts(8, first_length=200)
ROOM_FOR_FEW = {"num_gpu_blocks_override": 36, "max_model_len": 512}
"""Room for a few of the crowd."""
SPARSE: dict[str, Any] = {"enable_prefix_caching": True, "dtype": "bfloat16"}
"""vLLM's default: states at the ends of prompts only. Its kernels for the CPU have them in bfloat16 alone."""
DENSE: dict[str, Any] = SPARSE | {"prefix_cache_retention_interval": BLOCK}
BLOCKWISE = {"max_num_batched_tokens": BLOCK}
"""States are taken where chunks of a prompt end. With one prompt at a time, these are the ends of its blocks."""


class Computed(NamedTuple):
    """What vLLM answers by itself, to one after the other.

    Only so is it certain to say the same again: where chunks of prompts end elsewhere, and where a preempted request is
    computed anew, states come of sums in another order, and on the CPU in bf16.
    """

    prompts: list[Answer]
    forked: Answer
    """When its own cache has the prompts."""
    crowd: list[Answer]
    """Whose prompts end in the chunk after the only one that has a state at its end."""


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A lab whose process no other module gets: once vLLM has loaded experts on the CPU, Python's root logger has a
    handler, which the connector takes for the application's, and what other modules look for is not printed.
    """
    home = tmp_path_factory.mktemp("home")
    tiny_qwen3_next.make(home / "model")
    with closing(Lab(home, home / "model")) as lab:
        yield lab


@pytest.fixture(scope="module")
def computed(apart: Lab) -> Computed:
    with apart.engine(**DENSE, **BLOCKWISE) as engine:
        prompts = _ask(engine, PROMPTS)
        assert cached_of(_ask(engine, PROMPTS, num_tokens=1)) == _all_hit(PROMPTS)
        (forked,) = engine.generate([FORK])
        assert forked.num_cached == 2 * BLOCK
        engine.restart(**DENSE)
        crowd = _ask(engine, CROWD, num_tokens=FEW)
    return Computed(prompts, forked, crowd)


def _ask(engine: Engine, prompts: Sequence[Sequence[int]], **how: Any) -> list[Answer]:
    """One after the other."""
    return [answer for prompt in prompts for answer in engine.generate([prompt], **how)]


def _all_hit(prompts: Sequence[Sequence[int]]) -> list[int]:
    return all_hit(prompts, block_size=BLOCK)


def test_what_vllm_itself_would_hit_is_loaded(apart: Lab, computed: Computed, pool: CachePool) -> None:
    """By the same engine and by another one, of prompts as of answers; nothing by another tenant."""
    connector = transfer(settings(pool={"address": pool.address}))
    with apart.engine(connector, **DENSE, **BLOCKWISE) as engine:
        cold = _ask(engine, PROMPTS)
        assert tokens_of(cold) == tokens_of(computed.prompts)
        assert cached_of(cold) == none_hit(PROMPTS)
        engine.reset()
        warm = _ask(engine, PROMPTS)
        assert tokens_of(warm) == tokens_of(computed.prompts)
        assert cached_of(warm) == _all_hit(PROMPTS)
        engine.reset()
        assert engine.generate([FORK]) == [computed.forked]
    turns = continued(PROMPTS, computed.prompts, 35)
    with apart.engine(connector, own_process=True, **DENSE, **BLOCKWISE) as engine:
        first = _ask(engine, PROMPTS, num_tokens=FEW)
        assert tokens_of(first) == [answer.tokens[:FEW] for answer in computed.prompts]
        assert cached_of(first) == _all_hit(PROMPTS)
        again = _ask(engine, turns, num_tokens=2)
        assert tokens_of(again) == [answer.tokens[35:37] for answer in computed.prompts]
        assert cached_of(again) == _all_hit(turns)
        assert sum(cached_of(again)) > sum(cached_of(first)), "no block of an answer"
        engine.restart(transfer(settings("blue", pool={"address": pool.address})), **DENSE, **BLOCKWISE)
        others = _ask(engine, PROMPTS, num_tokens=FEW)
    assert tokens_of(others) == [answer.tokens[:FEW] for answer in computed.prompts]
    assert cached_of(others) == none_hit(PROMPTS)


def test_as_few_states_as_vllm_keeps_and_garbled_ones(apart: Lab, computed: Computed, tmp_path: Path) -> None:
    connector = transfer(settings(disk={"directory": str(tmp_path), "reserve_bytes": 0}))
    folder = tmp_path / "0-0"
    expected = [answer.tokens[:FEW] for answer in computed.prompts]
    with apart.engine(connector, **SPARSE, **BLOCKWISE) as engine:
        assert tokens_of(_ask(engine, PROMPTS, num_tokens=FEW)) == expected
        engine.reset()
        warm = _ask(engine, PROMPTS, num_tokens=FEW)
        assert tokens_of(warm) == expected
        assert cached_of(warm) == _all_hit(PROMPTS)
        engine.reset()
        (forked,) = engine.generate([FORK], num_tokens=FEW)
        assert (forked.tokens, forked.num_cached) == (computed.forked.tokens[:FEW], 0), "a hit without a state"
        engine.stop()
        states = NUM_STATE_GROUPS * len([*PROMPTS, FORK])
        kv = num_blocks([*PROMPTS, FORK], FEW, block_size=BLOCK) - len(FORK[:200]) // BLOCK
        assert disk_rig.num_blocks(folder) == kv + states
        for path, offset, nbytes in disk_rig.places(folder).values():
            middle = path.read_bytes()[offset + nbytes // 2 :][:8]
            disk_rig.overwrite(path, offset + nbytes // 2, bytes(255 - byte for byte in middle))
        engine.start(connector, **SPARSE, **BLOCKWISE)
        engine.generate(make_prompts(1, first_length=10, seed=1))  # by now the engine knows what the folder has
        answers = _ask(engine, PROMPTS, num_tokens=FEW)
        assert tokens_of(answers) == expected
        assert engine.counter("vllm:kvtier_loaded_blocks") == 0
        assert engine.counter("vllm:kvtier_failed_blocks") > 0, "they were not even read"
        engine.reset()
        again = _ask(engine, PROMPTS, num_tokens=FEW)
        assert tokens_of(again) == expected
        assert cached_of(again) == _all_hit(PROMPTS), "what was computed instead was not saved"
        engine.reset(connector=True)
        assert cached_of(_ask(engine, PROMPTS, num_tokens=1)) == none_hit(PROMPTS)


@pytest.mark.parametrize("mode", [{}, {"async_scheduling": True}], ids=["plain", "asynchronous"])
def test_preemption(apart: Lab, computed: Computed, mode: dict[str, Any]) -> None:
    """Device blocks of states go to other requests, and to attention, while they are being copied."""
    with apart.engine(transfer(settings()), **DENSE, **ROOM_FOR_FEW, **mode) as engine:
        for _ in range(2):
            num_before = engine.counter("vllm:num_preemptions")
            crowd = engine.generate(CROWD, num_tokens=CROWD_TOKENS)
            assert [answer.tokens[0] for answer in crowd] == [answer.tokens[0] for answer in computed.crowd]
            assert engine.counter("vllm:num_preemptions") > num_before
            engine.reset()
        alone = _ask(engine, CROWD, num_tokens=FEW)
    assert tokens_of(alone) == tokens_of(computed.crowd)
    assert cached_of(alone) == _all_hit(CROWD)
