"""The order that knows the cache decides which request begins next, and which waits for which."""

from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from engine_rig import EngineRig, MakeRig, judge, rigs
from kvtier_engine.model.paged_kv import PagedKV
from tiny_model import MODEL, prompt

make_rig = pytest.fixture(rigs)


class Recorder:
    """The model, keeping how many tokens each step computed of each request."""

    def __init__(self, rig: EngineRig) -> None:
        self.steps: list[list[int]] = []
        rig.scheduler._model = self

    def forward(self, chunks: Any, kv: PagedKV) -> Tensor:
        self.steps.append([len(chunk.token_ids) for chunk in chunks])
        return MODEL.forward(chunks, kv)

    @property
    def num_tokens(self) -> int:
        return sum(map(sum, self.steps))


def ask_all(rig: EngineRig, prompts: Sequence[list[int]], max_tokens: int = 1) -> list[int]:
    ids = [rig.add(each, max_tokens) for each in prompts]
    rig.run()
    assert [rig.done[i].token_ids for i in ids] == [judge(each, max_tokens) for each in prompts]
    return ids


def test_equal_prompts_that_arrive_together_are_computed_once(make_rig: MakeRig) -> None:
    rig = make_rig(tiers=False, cache_aware=True)
    recorder = Recorder(rig)
    ask_all(rig, [prompt(40)] * 8)
    assert recorder.steps[0] == [40]
    assert recorder.steps[1] == [1] * 7, "the last token is computed, since the answer follows from it"


def test_a_shared_prefix_that_arrives_with_many_is_computed_once(make_rig: MakeRig) -> None:
    rig = make_rig(tiers=False, cache_aware=True, max_batch_tokens=16, num_blocks=128)
    recorder = Recorder(rig)
    ask_all(rig, [[*prompt(48), *prompt(7, seed=i)] for i in range(1, 7)], max_tokens=3)
    assert recorder.num_tokens == 48 + 6 * 7 + 6 * 2


def test_who_waits_for_a_prefix_goes_on_when_it_is_given_up(make_rig: MakeRig) -> None:
    rig = make_rig(tiers=False, cache_aware=True, max_batch_tokens=8)
    first, second = rig.add(prompt(40), 4), rig.add([*prompt(40), 7], 4)
    rig.step()
    assert len(rig.scheduler.requests.waiting) == 1
    rig.scheduler.cancel(first)
    rig.run()
    assert rig.done[second].token_ids == judge([*prompt(40), 7], 4)
    assert rig.done[second].cached_by_tier == {"device": 8}


def test_who_waits_for_a_prefix_goes_on_when_the_cache_is_reset(make_rig: MakeRig) -> None:
    rig = make_rig(tiers=False, cache_aware=True, max_batch_tokens=8)
    ids = [rig.add(prompt(40), 4), rig.add([*prompt(40), 7], 4)]
    rig.step()
    rig.scheduler.reset_cache()
    rig.run()
    assert [rig.done[i].token_ids for i in ids] == [judge(prompt(40), 4), judge([*prompt(40), 7], 4)]


def test_the_longest_cached_prefix_begins_first(make_rig: MakeRig) -> None:
    rig = make_rig(tiers=False, cache_aware=True, max_running=1)
    rig.ask(prompt(40, seed=1))
    rig.ask(prompt(24, seed=2))
    strangers = [rig.add(prompt(16, seed=10 + i), 1) for i in range(2)]
    short, long = rig.add([*prompt(24, seed=2), 3], 1), rig.add([*prompt(40, seed=1), 3], 1)
    for request in rig.scheduler.requests.waiting:
        request.arrived_at = 0.0  # all at once
    rig.run()
    assert list(rig.done)[2:] == [long, short, *strangers]


def test_a_cached_prefix_passes_who_came_before_it_by_as_long_as_computing_it_takes(make_rig: MakeRig) -> None:
    """Requests with a cached prefix arrive without end; one without has its turn."""
    rig = make_rig(tiers=False, cache_aware=True, max_running=1)
    order = rig.scheduler._waiting_order
    assert order is not None
    order._clock = lambda: now
    now = 1000.0
    rig.ask(prompt(40, seed=1))
    order._tokens_per_s = 10.0  # so a prefix of 40 is worth 4 s
    order.note_computed = lambda *_: None  # type: ignore[method-assign]
    stranger = rig.add(prompt(16, seed=9), 1)
    rig.scheduler.requests.waiting[-1].arrived_at = now
    waited_s = 0.0
    while stranger not in rig.done:
        for _ in range(2):
            rig.add([*prompt(40, seed=1), 3], 1)
            rig.scheduler.requests.waiting[-1].arrived_at = now
        now += 0.5
        waited_s += 0.5
        rig.step()
        assert waited_s < 20, "the stranger starves"
    # Two requests came each half second, and one of them was served. The requests of the first four seconds passed.
    assert 8.0 <= waited_s <= 9.0


def test_first_come_first_served_stays_a_choice(make_rig: MakeRig) -> None:
    rig = make_rig(tiers=False, max_running=1)
    rig.ask(prompt(40, seed=1))
    stranger, cached = rig.add(prompt(16, seed=10), 1), rig.add([*prompt(40, seed=1), 3], 1)
    rig.run()
    assert list(rig.done)[1:] == [stranger, cached]
