"""The engine in a thread of its own: what it refuses, whom it serves, and how it ends."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from torch import Tensor

from engine_rig import PATIENCE_S, TOKENS_PER_BLOCK, EngineRig, MakeRig, RunningEngine, judge, rigs
from hierarchy_rig import pool_tier
from kvtier.config import parse_config
from kvtier.errors import ClosedError, ConfigError, InvalidInputError, LimitExceededError
from kvtier.tiers.base import Tier
from kvtier_engine.assemble import assembled_engine
from kvtier_engine.model.paged_kv import PagedKV
from kvtier_engine.scheduling.completion import Completion
from kvtier_engine.scheduling.engine import Engine, EngineLimits
from kvtier_engine.scheduling.sampling_params import Sampling
from tiny_model import CONFIG, prompt

make_rig = pytest.fixture(rigs)
pool = pytest.fixture(pool_tier)


def test_engine_refuses_what_can_never_run(make_rig: MakeRig) -> None:
    with RunningEngine(make_rig(tiers=False)) as engine:
        ignore: Callable[[Completion], None] = lambda completion: None  # noqa: E731
        with pytest.raises(LimitExceededError, match=r"95 prompt tokens and max_tokens 6 .* 100 tokens"):
            engine.submit(prompt(95), Sampling(max_tokens=6), 0.0, ignore)
        with pytest.raises(InvalidInputError, match="empty"):
            engine.submit([], Sampling(max_tokens=6), 0.0, ignore)
        for wrong in (-1, CONFIG.vocab_size):
            with pytest.raises(InvalidInputError, match="token ids"):
                engine.submit([3, wrong], Sampling(max_tokens=6), 0.0, ignore)
    with pytest.raises(ClosedError):
        engine.submit([1], Sampling(max_tokens=6), 0.0, ignore)


@pytest.mark.parametrize("num_blocks", [8, 7], ids=["the model", "the memory"])
def test_engine_names_the_limit_that_counts(make_rig: MakeRig, num_blocks: int) -> None:
    rig = make_rig(tiers=False, num_blocks=num_blocks)
    limits = EngineLimits.of(max_positions=8 * TOKENS_PER_BLOCK, kv=rig.kv, vocab_size=CONFIG.vocab_size)
    assert limits.max_total_tokens == num_blocks * TOKENS_PER_BLOCK
    engine = Engine(rig.scheduler, limits, hasher=None)
    with pytest.raises(LimitExceededError) as caught:
        engine.submit(prompt(limits.max_total_tokens), Sampling(max_tokens=1), 0.0, lambda completion: None)
    assert ("the model's own context" in str(caught.value)) == (num_blocks == 8)
    assert "shorten the prompt or lower max_tokens" in str(caught.value)


@pytest.mark.parametrize("tokens_per_block", [17, 512])
def test_blocks_that_attention_was_not_tried_with_name_the_remedy(tokens_per_block: int) -> None:
    config = parse_config({"cache": {"tokens_per_block": tokens_per_block}}, source="x", environ={})
    words = rf"cache\.tokens_per_block: {tokens_per_block}, .*powers of two up to 256; use one of them, such as 16"
    with pytest.raises(ConfigError, match=words), assembled_engine(config):
        pass


def test_engine_serves_many_threads_and_stop_cancels_the_rest(make_rig: MakeRig, pool: Tier) -> None:
    begun, stopped = threading.Event(), threading.Event()

    def hold(token: int) -> None:
        begun.set()
        assert stopped.wait(PATIENCE_S)

    with RunningEngine(make_rig(shared=pool)) as engine:

        def ask(seed: int) -> Completion:
            answer: Future[Completion] = Future()
            engine.submit(prompt(20 + seed, seed=seed % 3), Sampling(max_tokens=5), 0.0, answer.set_result)
            return answer.result(PATIENCE_S)

        with ThreadPoolExecutor(8) as clients:
            answers = list(clients.map(ask, range(8)))
        last: Future[Completion] = Future()
        engine.submit(prompt(20), Sampling(max_tokens=80), 0.0, last.set_result, hold)
        assert begun.wait(PATIENCE_S)
        engine.stop()
        stopped.set()
        cancelled = last.result(PATIENCE_S)
    assert [each.token_ids for each in answers] == [judge(prompt(20 + seed, seed=seed % 3), 5) for seed in range(8)]
    assert (cancelled.finish_reason, cancelled.token_ids) == ("cancelled", judge(prompt(20), 1))


class Broken:
    """A model whose every step fails."""

    def forward(self, chunks: Any, kv: PagedKV) -> Tensor:
        raise RuntimeError("the memory is on fire")


def test_a_failing_step_ends_every_request_and_the_engine_says_so() -> None:
    rig = EngineRig(tiers=False)
    rig.scheduler._model = Broken()
    answer: Future[Completion] = Future()
    refused: Future[Completion] = Future()
    with RunningEngine(rig, fails=True) as engine:
        engine.submit([1, 2], Sampling(max_tokens=3), 0.0, answer.set_result)
        assert answer.result(PATIENCE_S).finish_reason == "failed"
        assert not engine.healthy
        with pytest.raises(ClosedError, match="failed"):
            engine.submit([1], Sampling(max_tokens=3), 0.0, refused.set_result)
    assert not refused.done()
