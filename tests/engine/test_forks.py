"""Branches of one request: what each answers, which blocks they share, and that all blocks are given back."""

from typing import Any

import pytest
import torch
from torch import Tensor

from engine_rig import TOKENS_PER_BLOCK, EngineRig, MakeRig, judge, rigs
from kvtier.errors import InvalidInputError
from kvtier_engine.model.paged_kv import PagedKV
from kvtier_engine.scheduling.completion import Completion
from kvtier_engine.scheduling.engine import Engine, EngineLimits
from kvtier_engine.scheduling.sampling_params import Sampling
from naive_answers import naive_answer
from tiny_model import MODEL, VOCABULARY, prompt

make_rig = pytest.fixture(rigs)


class Counting:
    """The model; counts the tokens that it computes."""

    def __init__(self) -> None:
        self.num_tokens = 0

    def forward(self, chunks: Any, kv: PagedKV) -> Tensor:
        self.num_tokens += sum(len(chunk.token_ids) for chunk in chunks)
        return MODEL.forward(chunks, kv)


class Guessing:
    """A model that computes nothing."""

    def forward(self, chunks: Any, kv: PagedKV) -> Tensor:
        return torch.zeros(len(chunks), VOCABULARY)


def answers_of(rig: EngineRig, request: int) -> list[tuple[int, ...]]:
    return [completion.token_ids for _, completion in sorted(rig.answers[request].items())]


@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("num_tokens", [20, 23], ids=["whole blocks", "part of a block"])
def test_each_branch_answers_as_it_would_alone(make_rig: MakeRig, num_tokens: int, cache: bool) -> None:
    """Whatever `n` is; the prompt is computed once."""
    tokens = prompt(num_tokens)
    for num_branches in (1, 2, 5):
        rig = make_rig(tiers=False, cache=cache)
        rig.scheduler._model = counting = Counting()
        request = rig.add(tokens, 9, temperature=1.0, seed=4, num_branches=num_branches)
        rig.run()
        sampling = Sampling(max_tokens=9, temperature=1.0, seed=4)
        assert answers_of(rig, request) == [naive_answer(tokens, sampling, i)[0] for i in range(num_branches)]
        assert len(set(answers_of(rig, request))) == num_branches, "draws are independent"
        assert counting.num_tokens == num_tokens + 8 * num_branches
        assert rig.counter("engine_prompt_tokens") == num_tokens
        assert rig.counter("engine_answer_tokens") == 9 * num_branches
        assert rig.counter("engine_requests", reason="length") == 1


def test_without_temperature_all_branches_are_equal(make_rig: MakeRig) -> None:
    rig = make_rig(cache_aware=True)
    request = rig.add(prompt(21), 9, num_branches=3)
    rig.run()
    assert answers_of(rig, request) == [judge(prompt(21), 9)] * 3


@pytest.mark.parametrize("num_tokens", [3000, 3003])
def test_a_prompt_is_held_once(make_rig: MakeRig, num_tokens: int) -> None:
    """Eight branches take the blocks of one, and those of their own answers: at most a copied block more each."""
    most: dict[int, int] = {}
    for num_branches in (1, 8):
        rig = make_rig(tiers=False, num_blocks=800)
        rig.scheduler._model = Guessing()
        rig.add(prompt(num_tokens), 10, temperature=1.0, num_branches=num_branches)
        most[num_branches] = 0
        while rig.scheduler.num_unfinished:
            rig.step()
            most[num_branches] = max(most[num_branches], rig.block_pool.num_blocks - rig.block_pool.num_free)
    of_prompt = num_tokens // TOKENS_PER_BLOCK
    assert most[8] == of_prompt + 8 * (most[1] - of_prompt)
    assert most[8] - 7 * (most[1] - of_prompt) <= most[1] <= most[8] <= 1.1 * most[1]


def test_branches_share_blocks_until_they_write(make_rig: MakeRig) -> None:
    """The last one that writes needs no copy; the first block after the prompt is everybody's own from the start."""
    rig = make_rig(tiers=False)
    copies: list[tuple[int, int, int]] = []
    cow = rig.cache._blocks._copy_on_write
    cow._copy_tokens = lambda *copied: (copies.append(copied), rig.kv.copy_tokens(*copied))[0]
    rig.add(prompt(18), 3, temperature=1.0, num_branches=3)
    rig.step()
    tables = [request.block_ids for request in rig.scheduler.requests.running]
    assert tables[0] == tables[1] == tables[2]
    assert rig.block_pool.num_blocks - rig.block_pool.num_free == 5
    rig.step()
    assert [num_tokens for _, _, num_tokens in copies] == [2, 2]
    tables = [request.block_ids for request in rig.scheduler.requests.running]
    assert all(table[:4] == tables[0][:4] for table in tables)
    assert len({table[4] for table in tables}) == 3
    rig.run()
    assert len(copies) == 2


@pytest.mark.parametrize("cache_aware", [False, True])
@pytest.mark.parametrize("tiers", [False, True])
def test_branches_that_lose_their_blocks_answer_the_same(make_rig: MakeRig, tiers: bool, cache_aware: bool) -> None:
    rig = make_rig(tiers=tiers, num_blocks=14, cache_aware=cache_aware)
    sampling = Sampling(max_tokens=24, temperature=1.0, seed=2)
    requests = [rig.add(prompt(18, seed=i), 24, temperature=1.0, seed=2, num_branches=3) for i in range(2)]
    rig.run()
    assert rig.counter("engine_preemptions") > 0
    for seed, request in enumerate(requests):
        assert answers_of(rig, request) == [naive_answer(prompt(18, seed=seed), sampling, i)[0] for i in range(3)]
        assert all(done.cached_by_tier == {} for done in rig.answers[request].values())


def test_a_request_waits_for_places_for_all_its_branches(make_rig: MakeRig) -> None:
    rig = make_rig(tiers=False, max_running=4)
    first = rig.add(prompt(10), 12, num_branches=3)
    second = rig.add(prompt(10, seed=1), 4, num_branches=2)
    rig.step()
    assert len(rig.scheduler.requests.running) == 3
    while len(rig.scheduler.requests.running) <= 4 and rig.scheduler.num_unfinished:
        rig.step()
    assert not rig.scheduler.num_unfinished, "never more than four"
    assert list(rig.done) == [first, second]


@pytest.mark.parametrize("when", ["queued", "prefill", "forked", "parted"])
def test_cancelled_branches_give_everything_back(make_rig: MakeRig, when: str) -> None:
    rig = make_rig(tiers=False, max_batch_tokens=8)
    request = rig.add(prompt(18), 20, temperature=1.0, num_branches=3)
    for _ in range({"queued": 0, "prefill": 1, "forked": 3, "parted": 5}[when]):
        rig.step()
    if when in ("forked", "parted"):
        rig.scheduler.cancel(request, "stop", 1)
        assert [done.finish_reason for done in rig.answers[request].values()] == ["stop"]
    rig.scheduler.cancel(request)
    assert sorted(rig.answers[request]) == [0, 1, 2]
    assert rig.counter("engine_requests", reason="cancelled") == 1
    assert rig.block_pool.num_free == rig.block_pool.num_blocks
    assert rig.ask(prompt(18)).token_ids == judge(prompt(18))


def test_branches_end_each_by_itself(make_rig: MakeRig) -> None:
    tokens, sampling = prompt(13), Sampling(max_tokens=30, temperature=1.0, seed=0)
    whole = [naive_answer(tokens, sampling, i)[0] for i in range(4)]
    ends = (whole[0][0], whole[1][7])
    rig = make_rig(tiers=False)
    request = rig.add(tokens, 30, temperature=1.0, num_branches=4, eos_token_ids=ends)
    rig.run()
    for answer, full in zip(answers_of(rig, request), whole, strict=True):
        assert answer == full[: next((i + 1 for i, token in enumerate(full) if token in ends), 30)]
    assert rig.done[request].finish_reason == "stop"


def test_log_probabilities_are_the_models(make_rig: MakeRig) -> None:
    rig = make_rig(tiers=False)
    request = rig.add(prompt(13), 7, temperature=0.7, top_p=0.8, seed=0, num_branches=2, num_top=3)
    rig.run()
    sampling = Sampling(max_tokens=7, temperature=0.7, top_p=0.8, seed=0)
    for branch, done in rig.answers[request].items():
        token_ids, logprobs = naive_answer(prompt(13), sampling, branch)
        assert done.token_ids == token_ids
        torch.testing.assert_close([each.of_token for each in done.logprobs], logprobs, rtol=0, atol=1e-5)
        for token_id, each in zip(token_ids, done.logprobs, strict=True):
            top = [value for _, value in each.top]
            assert len(top) == 3
            assert top == sorted(top, reverse=True)
            assert dict(each.top).get(token_id, each.of_token) == each.of_token <= top[0]


def test_more_branches_than_may_run_are_refused(make_rig: MakeRig) -> None:
    rig = make_rig(tiers=False, max_running=4)
    engine = Engine(rig.scheduler, EngineLimits(max_total_tokens=100, vocab_size=61), hasher=rig.hasher)
    done: list[Completion] = []
    with pytest.raises(InvalidInputError, match=r"5 answers .* up to 4 at once; ask for fewer"):
        engine.submit([1], Sampling(max_tokens=1, num_branches=5), 0.0, done.append)
    engine.submit([1], Sampling(max_tokens=1, num_branches=4), 0.0, done.append)
    engine.close()
    assert [completion.finish_reason for completion in done] == ["cancelled"] * 4
