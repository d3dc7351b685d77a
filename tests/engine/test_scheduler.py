"""The scheduler on a small real model: who computes when, and how requests end; answers stay."""

import random
from typing import Any

import pytest
from torch import Tensor

from engine_rig import EngineRig, MakeRig, judge, rigs
from hierarchy_rig import Held, pool_tier
from kvtier.tiers.base import Tier
from kvtier_engine.model.llama import LlamaModel
from kvtier_engine.model.paged_kv import PagedKV
from tiny_model import MODEL, prompt

make_rig = pytest.fixture(rigs)
pool = pytest.fixture(pool_tier)


@pytest.mark.parametrize("stage", ["queued", "lookup", "load", "prefill", "decode"])
def test_cancelled_requests_give_everything_back(make_rig: MakeRig, pool: Tier, stage: str) -> None:
    tokens = prompt(41)
    make_rig(shared=pool).ask(tokens)
    held = Held(pool)
    rig = make_rig(shared=held, max_batch_tokens=8)
    mine = prompt(41, seed=9) if stage in ("prefill", "decode") else tokens
    if stage == "lookup":
        held.lookup_gate.clear()
    if stage == "load":
        held.gate.clear()
    request = rig.add(mine, max_tokens=20)
    if stage == "lookup":
        rig.step()
    elif stage == "load":
        rig.run_until(held.entered.is_set)
    elif stage == "prefill":
        rig.run_until(rig.step)
    elif stage == "decode":
        rig.run_until(lambda: rig.counter("engine_answer_tokens") == 0 and _num_tokens(rig) > 43)
    rig.scheduler.cancel(request)
    assert rig.done[request].finish_reason == "cancelled"
    assert (len(rig.done[request].token_ids) > 0) == (stage == "decode")
    rig.scheduler.cancel(request)  # once more changes nothing
    held.lookup_gate.set()
    held.gate.set()
    rig.run()
    assert rig.block_pool.num_free == rig.block_pool.num_blocks
    assert rig.ask(tokens).token_ids == judge(tokens)


def _num_tokens(rig: EngineRig) -> int:
    return sum(len(request.tokens) for request in rig.scheduler.requests.running)


class _Recorder:
    """The model, keeping what it was asked for."""

    def __init__(self, model: LlamaModel) -> None:
        self.model = model
        self.steps: list[list[int]] = []

    def forward(self, chunks: Any, kv: PagedKV) -> Tensor:
        self.steps.append([len(chunk.token_ids) for chunk in chunks])
        return self.model.forward(chunks, kv)


def test_decodes_come_first_and_prefills_in_chunks(make_rig: MakeRig) -> None:
    rig = make_rig(tiers=False, max_batch_tokens=10)
    recorder = _Recorder(MODEL)
    rig.scheduler._model = recorder
    tokens = [prompt(5, seed=1), prompt(23, seed=2)]
    for each in tokens:
        rig.add(each, max_tokens=4)
    rig.run()
    assert recorder.steps[:4] == [[5, 5], [1, 9], [1, 9], [1, 1]]
    assert max(sum(step) for step in recorder.steps) <= 10
    assert [rig.done[i + 1].token_ids for i in range(2)] == [judge(each, 4) for each in tokens]


def test_tokens_are_told_one_by_one_before_the_end(make_rig: MakeRig) -> None:
    """Each once and in order, also to requests that lose their blocks and start again."""
    rig = make_rig(tiers=False, num_blocks=16)
    told: list[list[int]] = [[], [], []]
    ids = [rig.add(prompt(20, seed=i), 24, on_token=told[i].append) for i in range(3)]
    silent = rig.add(prompt(5), 4)
    rig.run_until(lambda: len(told[0]) == 3)
    assert not rig.done
    rig.run()
    assert rig.counter("engine_preemptions") > 0
    assert [tuple(each) for each in told] == [rig.done[i].token_ids for i in ids]
    assert rig.done[silent].token_ids == judge(prompt(5), 4)


def test_a_requester_may_find_the_answer_complete(make_rig: MakeRig) -> None:
    rig = make_rig(tiers=False)
    told: list[int] = []
    request = rig.add(prompt(9), 200, on_token=told.append)
    rig.run_until(lambda: len(told) == 15)
    rig.scheduler.cancel(request, "stop")
    assert rig.done[request].finish_reason == "stop"
    assert rig.done[request].token_ids == tuple(told)
    assert rig.ask([*prompt(9), *told]).cached_by_tier == {"device": 20}, "its blocks stay findable"


def test_eos_ends_an_answer_and_is_its_last_token(make_rig: MakeRig) -> None:
    tokens = prompt(12)
    full = judge(tokens, 12)
    stop = next(token for token in full if full.index(token) >= 2)
    rig = make_rig(tiers=False)
    request = rig.add(tokens, 12, eos_token_ids=(stop,))
    rig.run()
    assert rig.done[request].token_ids == full[: full.index(stop) + 1]
    assert rig.done[request].finish_reason == "stop"


def test_more_requests_than_may_run_wait_their_turn(make_rig: MakeRig) -> None:
    rig = make_rig(tiers=False, max_running=2)
    ids = [rig.add(prompt(10, seed=i)) for i in range(5)]
    rig.step()
    assert len(rig.scheduler.requests.running) == 2
    rig.run()
    assert list(rig.done) == ids
    assert all(rig.done[i + 1].token_ids == judge(prompt(10, seed=i)) for i in range(5))


@pytest.mark.parametrize("tiers", [False, True], ids=["device only", "with host memory"])
def test_preempted_requests_start_again_and_answer_the_same(make_rig: MakeRig, tiers: bool) -> None:
    rig = make_rig(tiers=tiers, num_blocks=16)
    prompts = [prompt(20, seed=i) for i in range(3)]
    for each in prompts:
        rig.add(each, max_tokens=24)
    rig.run()
    assert rig.counter("engine_preemptions") > 0
    for index, each in enumerate(prompts):
        done = rig.done[index + 1]
        assert done.token_ids == judge(each, 24)
        assert done.cached_by_tier == {}, "what a request computed itself is not a hit"


@pytest.mark.parametrize(
    ("seed", "cache_aware"),
    [(seed, cache_aware) for cache_aware in (False, True) for seed in range(6 - 2 * cache_aware)],
)
def test_random_traffic_never_changes_an_answer(make_rig: MakeRig, pool: Tier, seed: int, cache_aware: bool) -> None:
    """Prefix-sharing requests, small memories, broken blocks, cancellations, resets: two engines over one pool."""
    rng = random.Random(seed)
    held = Held(pool)
    rigs = [
        make_rig(shared=held, num_blocks=24, num_slots=rng.choice([16, 40]), clean_ahead_blocks=rng.choice([0, 8]),
                 max_batch_tokens=rng.choice([7, 64]), max_running=rng.choice([2, 8]), cache_aware=cache_aware)
        for _ in range(2)
    ]  # fmt: skip
    documents = [prompt(40, seed=100 + i) for i in range(3)]
    asked: list[tuple[EngineRig, int, list[int], int]] = []
    cancelled: set[tuple[int, int]] = set()
    for _ in range(40):
        rig = rng.choice(rigs)
        tokens = rng.choice(documents)[: rng.randrange(1, 41)] + prompt(rng.randrange(1, 6), seed=rng.randrange(4))
        max_tokens = rng.randrange(1, 9)
        asked.append((rig, rig.add(tokens, max_tokens), tokens, max_tokens))
        if rng.random() < 0.3 and rig.hasher is not None:
            held.broken = set(rng.sample(rig.hasher.hash_blocks(rng.choice(documents)), 3))
        if rng.random() < 0.2:
            rig, request_id, _, _ = rng.choice(asked)
            rig.scheduler.cancel(request_id)
            cancelled.add((id(rig), request_id))
        if rng.random() < 0.1:
            rng.choice(rigs).scheduler.reset_cache()
        for each in rigs:
            for _ in range(rng.randrange(4)):
                each.step()
            each.block_pool.check()
    for rig in rigs:
        rig.run()
    for rig, request_id, tokens, max_tokens in asked:
        done, full = rig.done[request_id], judge(tokens, max_tokens)
        if done.finish_reason == "cancelled":
            assert (id(rig), request_id) in cancelled
            assert done.token_ids == full[: len(done.token_ids)]
        else:
            assert done.token_ids == full, f"seed {seed}"
