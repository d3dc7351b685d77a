"""Requests, forks, cancellations and resets in any order over small block pools: answers stay, blocks come back."""

from collections import Counter
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine_rig import EngineRig
from kvtier_engine.model.llama import LlamaModel
from kvtier_engine.scheduling.beam_search import BeamSettings
from kvtier_engine.scheduling.request import NO_BLOCK
from kvtier_engine.scheduling.sampling_params import Sampling
from naive_answers import naive_answer, naive_beams
from tiny_model import MODEL, WINDOWED_MODEL, prompt

_DOCUMENTS = [prompt(26, seed=seed) for seed in range(2)]


@cache
def _naive(
    tokens: tuple[int, ...], sampling: Sampling, branch: int, model: LlamaModel
) -> tuple[tuple[int, ...], list[float]]:
    if sampling.beams is not None:
        return _naive_beams(tokens, sampling, model)[branch], []
    return naive_answer(tokens, sampling, branch, model)


@cache
def _naive_beams(tokens: tuple[int, ...], sampling: Sampling, model: LlamaModel) -> list[tuple[int, ...]]:
    return naive_beams(tokens, sampling, model)


class _Forks(RuleBasedStateMachine):
    @initialize(
        model=st.sampled_from([(MODEL, 1), (WINDOWED_MODEL, 3)]),
        num_blocks=st.sampled_from([11, 16, 30]),
        tiers=st.booleans(),
        cache_aware=st.booleans(),
        max_batch_tokens=st.sampled_from([5, 64]),
        max_running=st.sampled_from([3, 8]),
    )
    def start(
        self,
        model: tuple[LlamaModel, int],
        num_blocks: int,
        tiers: bool,
        cache_aware: bool,
        max_batch_tokens: int,
        max_running: int,
    ) -> None:
        self.model, blocks_of_token = model
        self.rig = EngineRig(
            model=self.model,
            num_blocks=num_blocks * blocks_of_token,
            tiers=tiers,
            num_slots=12 * blocks_of_token,
            cache_aware=cache_aware,
            max_batch_tokens=max_batch_tokens,
            max_running=max_running,
        )
        self.asked: dict[int, tuple[tuple[int, ...], Sampling]] = {}
        self.cancelled: set[tuple[int, int]] = set()

    @rule(
        document=st.sampled_from(_DOCUMENTS),
        num_tokens=st.integers(1, 26),
        num_branches=st.integers(1, 3),
        max_tokens=st.integers(1, 14),
        temperature=st.sampled_from([0.0, 1.0]),
        num_top=st.sampled_from([None, 2]),
        beams=st.sampled_from([False, False, True]),
    )
    def ask(
        self,
        document: list[int],
        num_tokens: int,
        num_branches: int,
        max_tokens: int,
        temperature: float,
        num_top: int | None,
        beams: bool,
    ) -> None:
        asked: dict[str, Any] = {"temperature": temperature, "num_branches": num_branches, "num_top": num_top}
        if beams and num_branches > 1:
            asked = {"num_branches": num_branches, "beams": BeamSettings(width=num_branches), "eos_token_ids": (30, 4)}
        tokens = document[:num_tokens]
        request = self.rig.add(tokens, max_tokens, seed=7, **asked)
        self.asked[request] = tuple(tokens), Sampling(max_tokens=max_tokens, seed=7, **asked)

    @rule(num_steps=st.integers(1, 6))
    def steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.rig.step()

    @precondition(lambda self: self.asked)
    @rule(choice=st.data(), branch=st.sampled_from([None, 0, 1, 2]))
    def cancel(self, choice: st.DataObject, branch: int | None) -> None:
        request = choice.draw(st.sampled_from(sorted(self.asked)))
        self.rig.scheduler.cancel(request, branch=branch)
        are_beams = self.asked[request][1].beams is not None
        self.cancelled.update((request, each) for each in range(3) if are_beams or branch in (None, 0, each))

    @rule()
    def reset(self) -> None:
        self.rig.scheduler.reset_cache()

    @invariant()
    def blocks_are_held_by_requests_and_copies_alone(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.rig.block_pool.check()
        scheduler = self.rig.scheduler
        held = Counter(b for request in scheduler.requests.begun for b in request.held_blocks)
        if self.rig.cache._saves is not None:
            held.update(block for blocks in self.rig.cache._saves.held.values() for block in blocks)
        references = {b.block_id: b.references for b in self.rig.block_pool._blocks if b.references}
        assert references == held

    @invariant()
    def nobody_writes_to_what_another_one_reads(self) -> None:
        if not hasattr(self, "rig"):
            return
        contents: dict[tuple[int, int], tuple[int, int]] = {}
        for request in self.rig.scheduler.requests.running:
            for group, table in enumerate((request.block_ids, *request.windowed)):
                for position, token in enumerate(request.tokens[: request.num_computed]):
                    if table[position // 4] != NO_BLOCK:
                        place = table[position // 4], position % 4
                        assert contents.setdefault(place, (group, token)) == (group, token)

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.rig.run()
        for request, (tokens, sampling) in self.asked.items():
            answers = self.rig.answers[request]
            assert sorted(answers) == list(range(sampling.num_branches))
            for branch, done in answers.items():
                expected, logprobs = _naive(tokens, sampling, branch, self.model)
                if sampling.beams is not None and done.finish_reason == "cancelled":
                    assert (request, branch) in self.cancelled
                    continue  # beams that had not ended are not what a search finds
                if done.finish_reason == "cancelled":
                    assert (request, branch) in self.cancelled
                    assert done.token_ids == expected[: len(done.token_ids)]
                else:
                    assert done.token_ids == expected
                if sampling.num_top is not None:
                    told = [each.of_token for each in done.logprobs]
                    assert told == pytest.approx(logprobs[: len(done.token_ids)], abs=1e-4)
        self.rig.close()


_Forks.TestCase.settings = settings(
    max_examples=25, stateful_step_count=25, suppress_health_check=[HealthCheck.too_slow]
)
TestForks = _Forks.TestCase
