"""Beams against transformers' on a small random model, with blocks for all of them and with too few."""

from typing import Any

import pytest
import torch

from engine_model_rig import small_folder
from engine_rig import EngineRig
from kvtier_engine.model.llama import LlamaModel
from kvtier_engine.model.model_folder import open_model
from kvtier_engine.model.weights import load_weights
from kvtier_engine.scheduling.beam_search import BeamSettings
from tiny_model import prompt

NUM_TOKENS = 14


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Any]]:
    """transformers' model, and ours as a rig takes it."""
    parent = tmp_path_factory.mktemp("model")
    path, hf = small_folder(parent)
    folder = open_model(path, parent)
    ours = LlamaModel(folder.config, load_weights(folder.weight_files, folder.config, torch.float32))
    return hf.float(), {"model": ours, "config": folder.config}


@pytest.mark.parametrize("num_blocks", [64, 9], ids=["room", "too few blocks"])
@pytest.mark.parametrize(
    ("settings", "num_ends"),
    [
        (BeamSettings(width=2), 0),
        (BeamSettings(width=4), 1),
        (BeamSettings(width=4), 40),
        (BeamSettings(width=3, early_stopping=True), 40),
        (BeamSettings(width=3, length_penalty=0.0), 40),
        (BeamSettings(width=3, length_penalty=2.0), 40),
    ],
)
def test_beams_are_those_of_transformers(
    models: tuple[Any, dict[str, Any]], settings: BeamSettings, num_ends: int, num_blocks: int
) -> None:
    """Answers that end early, and late: the more tokens end an answer, the sooner one does."""
    hf, ours = models
    ends = tuple(range(1, 1 + 7 * num_ends, 7))
    rig = EngineRig(tiers=False, num_blocks=num_blocks, cache_aware=True, **ours)
    for seed in range(3):
        tokens = prompt(17, seed=seed)
        request = rig.add(
            tokens, NUM_TOKENS, beams=settings, num_branches=settings.width, eos_token_ids=ends, num_top=None
        )
        rig.run()
        with torch.inference_mode():
            theirs = hf.generate(
                torch.tensor([tokens]),
                attention_mask=torch.ones(1, len(tokens)),
                do_sample=False,
                num_beams=settings.width,
                num_return_sequences=settings.width,
                max_new_tokens=NUM_TOKENS,
                length_penalty=settings.length_penalty,
                early_stopping=settings.early_stopping,
                eos_token_id=list(ends) or None,
                pad_token_id=0,
            )[:, len(tokens) :].tolist()
        answers = [done.token_ids for _, done in sorted(rig.answers[request].items())]
        assert answers == [_up_to_its_end(answer, ends) for answer in theirs]
        reasons = [done.finish_reason for _, done in sorted(rig.answers[request].items())]
        assert reasons == ["stop" if answer[-1] in ends else "length" for answer in answers]
    assert (rig.counter("engine_preemptions") > 0) == (num_blocks == 9)
    rig.close()


def _up_to_its_end(token_ids: list[int], ends: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(token_ids[: next((i + 1 for i, token in enumerate(token_ids) if token in ends), None)])
