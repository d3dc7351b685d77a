"""Sampling against transformers' definition of it, what a seed promises, and the same through an engine."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper, TopPLogitsWarper

from engine_rig import TOKENS_PER_BLOCK, MakeRig, judge, rigs
from kvtier.errors import InvalidInputError
from kvtier_engine.model.llama import Chunk
from kvtier_engine.model.paged_kv import allocate_kv
from kvtier_engine.scheduling.request import Request
from kvtier_engine.scheduling.sampling import _adjusted, sample
from kvtier_engine.scheduling.sampling_params import Sampling
from tiny_model import CONFIG, MODEL, prompt

make_rig = pytest.fixture(rigs)
ONE_IN_A_MILLION = 13.8
"""-ln of how often a test may fail by chance."""


def asker(**sampling: Any) -> Request:
    return Request(
        request_id=1,
        tokens=[1],
        sampling=Sampling(max_tokens=1, **{"seed": 7, **sampling}),
        hasher=None,
        on_done=lambda completion: None,
        arrived_at=0.0,
    )


def logits_of(size: int, spread: float, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * spread


def wanted(logits: Tensor, temperature: float, top_p: float) -> Tensor:
    """transformers' probabilities."""
    ids = torch.zeros((1, 1), dtype=torch.int64)
    warped = TemperatureLogitsWarper(temperature)(ids, logits.double()[None])
    return torch.softmax(TopPLogitsWarper(top_p)(ids, warped)[0], -1)


def require_drawn_from(probabilities: Tensor, drawn: Sequence[int]) -> None:
    """A chi-square test, all rare tokens taken as one."""
    seen = torch.bincount(torch.tensor(drawn), minlength=probabilities.numel())
    expected = probabilities * len(drawn)
    assert seen[expected == 0].sum() == 0, "outside of the nucleus"
    common = expected >= 5
    observed = torch.cat((seen[common], seen[~common].sum()[None])).double()
    truth = torch.cat((expected[common], expected[~common].sum()[None])).double()
    kept = truth > 0
    chi_square = ((observed - truth).square() / truth)[kept].sum().item()
    assert chi_square < chi_square_bound(int(kept.sum()) - 1)


def chi_square_bound(freedom: int) -> float:
    """Laurent and Massart, 2000: a chi-square variable is above it with at most e^-13.8."""
    return freedom + 2 * (freedom * ONE_IN_A_MILLION) ** 0.5 + 2 * ONE_IN_A_MILLION


CASES: dict[str, tuple[Tensor, float, float]] = {
    "all": (logits_of(40, 1.5), 1.0, 1.0),
    "cold": (logits_of(40, 1.5), 0.6, 1.0),
    "nucleus": (logits_of(40, 1.5), 1.0, 0.7),
    "hot nucleus": (logits_of(40, 1.5), 1.7, 0.95),
    "nucleus larger than the first look": (logits_of(700, 0.05), 1.0, 0.9),
    "two likely ones": (torch.tensor([0.0, 5.0, 5.0, 1.0]), 1.0, 0.5),
}


@pytest.mark.parametrize(("logits", "temperature", "top_p"), CASES.values(), ids=CASES.keys())
def test_draws_are_distributed_as_transformers_says(logits: Tensor, temperature: float, top_p: float) -> None:
    request = asker(temperature=temperature, top_p=top_p)
    require_drawn_from(wanted(logits, temperature, top_p), [sample(logits, request) for _ in range(6000)])


@pytest.mark.parametrize("top_p", [1e-9, 0.2, 0.5, 0.8, 0.999, 1 - 2**-53, 1.0])
@pytest.mark.parametrize("size", [1, 2, 300, 5000])
def test_no_draw_leaves_the_nucleus(size: int, top_p: float) -> None:
    """No draw is outside of transformers' nucleus, down to the one of a single token."""
    logits = logits_of(size, 2.0, seed=size)
    request = asker(temperature=1.3, top_p=top_p)
    possible = wanted(logits, 1.3, top_p) > 0
    assert all(possible[sample(logits, request)] for _ in range(200))
    if int(possible.sum()) == 1:
        assert sample(logits, request) == int(logits.argmax())


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_seed_repeats_draws_and_others_differ(top_p: float) -> None:
    logits = logits_of(500, 1.0)

    def draw(seed: int | None) -> Sequence[int]:
        request = asker(seed=seed, temperature=1.0, top_p=top_p)
        return [sample(logits, request) for _ in range(30)]

    assert draw(4) == draw(4) != draw(5)
    assert draw(None) != draw(None)


def test_draws_of_one_request_do_not_move_another_s() -> None:
    logits = logits_of(500, 1.0)
    first, second, alone = (asker(temperature=1.0) for _ in range(3))
    mixed = [(sample(logits, first), sample(logits, second)) for _ in range(10)]
    torch.rand(5)  # nor does anybody else's use of torch
    expected = [sample(logits, alone) for _ in range(10)]
    assert mixed == [(token, token) for token in expected]


def test_temperature_0_ignores_seed_and_top_p() -> None:
    logits = logits_of(500, 1.0)
    assert sample(logits, asker(temperature=0.0, top_p=0.3, seed=None)) == int(logits.argmax())


def test_equal_logits_are_all_drawn() -> None:
    request = asker(temperature=1.0, top_p=1.0)
    assert {sample(torch.full((8,), -1e30), request) for _ in range(300)} == set(range(8))


def test_seeded_sampling_repeats_and_other_seeds_differ(make_rig: MakeRig) -> None:
    rig = make_rig(tiers=False)
    answers = []
    for seed in (1, 1, 2):
        request = rig.add(prompt(9), 30, temperature=1.0, seed=seed)
        rig.run()
        answers.append(rig.done[request].token_ids)
    assert answers[0] == answers[1] != answers[2]


def test_temperature_draws_from_the_model(make_rig: MakeRig) -> None:
    """Frequencies of first tokens, each of a request with a seed of its own."""
    kv = allocate_kv(CONFIG, 4, TOKENS_PER_BLOCK, torch.float32)
    tokens = prompt(9)
    logits = MODEL.forward([Chunk(tokens, 0, [0, 1, 2])], kv)[0]
    rig = make_rig(tiers=False)
    ids = [rig.add(tokens, 1, temperature=1.5, seed=i) for i in range(400)]
    rig.run()
    require_drawn_from(wanted(logits, 1.5, 1.0), [rig.done[i].token_ids[0] for i in ids])


@pytest.mark.parametrize("penalty", [5e-324, 1e-38, 10.0])
def test_every_penalty_draws_a_token_that_there_is(penalty: float) -> None:
    for logit in (3.0, 1e30, -1e30):
        logits = logits_of(50, 3.0)
        logits[1] = logit
        drawn = sample(logits, asker(temperature=1.0, repetition_penalty=penalty))
        assert drawn == 1 if logit > 0 and penalty < 1 else 0 <= drawn < 50


class Dead:
    """A constraint that lets nothing go on."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def copy(self) -> "Dead":
        return self

    def allowed(self) -> Tensor:
        raise self._error

    def accept(self, token_id: int) -> None:
        raise self._error


@pytest.mark.parametrize(
    ("error", "failure"), [(InvalidInputError("too much"), "too much"), (RuntimeError("a bug"), "")]
)
def test_a_request_that_no_token_can_be_drawn_for_ends_alone(
    make_rig: MakeRig, error: Exception, failure: str, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig(tiers=False)
    expected = rig.ask(prompt(9)).token_ids
    dead, beside = rig.add(prompt(12), constraint=Dead(error)), rig.add(prompt(9))
    rig.run()
    assert (rig.done[dead].finish_reason, rig.done[dead].failure) == ("failed", failure)
    assert rig.done[beside].token_ids == expected
    assert ("a bug" in caplog.text) == (not failure)
    with pytest.raises(ValueError, match="no numbers"):
        sample(torch.full((8,), torch.nan), asker(temperature=1.0))


def test_penalties_and_bias_are_those_of_transformers_and_openai() -> None:
    logits = logits_of(50, 2.0)
    request = asker(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.3)
    request.tokens += [7, 7, 9]  # of an answer to the prompt [1]
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([request.tokens]), logits[None].clone())[0]
    expected[7] -= 0.5 + 2 * 0.25
    expected[9] -= 0.5 + 0.25
    before = logits.clone()
    assert sample(logits, request) == int(expected.argmax())
    torch.testing.assert_close(_adjusted(logits, request), expected)
    biased = asker(temperature=1.0, logit_bias=((3, 100.0), (4, -100.0)))
    assert {sample(logits, biased) for _ in range(50)} == {3}
    assert torch.equal(logits, before), "what others read is as it was"


@pytest.mark.parametrize("temperature", [1e-40, 1e-300, 5e-324])
def test_the_smallest_temperatures_take_the_likeliest_token(make_rig: MakeRig, temperature: float) -> None:
    rig = make_rig(tiers=False)
    request = rig.add(prompt(9), 5, temperature=temperature)
    rig.run()
    assert rig.done[request].token_ids == judge(prompt(9), 5)
