"""The disk tier of an engine that has no pool: it outlives the engine, and tells what was garbled."""

import shutil
from pathlib import Path

import pytest
from engine_lab import Lab
from vllm_rig import (
    BLOCK,
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

import disk_rig
import hugging_face_cache

PROMPTS = make_prompts()
WORKER = "0-0"
"""Each worker has a folder of its own."""


@pytest.fixture(scope="module")
def filled(lab: Lab, expected: list[Answer], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has what an engine computed for `PROMPTS`."""
    folder = tmp_path_factory.mktemp("disk")
    with lab.engine(_keeping(folder)) as engine:
        assert tokens_of(engine.generate(PROMPTS)) == tokens_of(expected)
    assert disk_rig.num_blocks(folder / WORKER) == num_blocks(PROMPTS)
    return folder


@pytest.fixture
def folder(filled: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(filled, tmp_path / "disk"))


def _keeping(folder: Path) -> dict[str, object]:
    return transfer(settings(disk={"directory": str(folder), "reserve_bytes": 0}))


def test_a_cold_start_by_the_models_name_hits_everything(
    lab: Lab, expected: list[Answer], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an engine has computed that was given the model's folder. The Hub is not reached, as on many machines."""
    name = "tiny/llama"
    hugging_face_cache.add(tmp_path / "cache", name, lab.model)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with lab.engine(_keeping(folder), own_process=True, model=name) as engine:
        answers = engine.generate(PROMPTS)
    assert tokens_of(answers) == tokens_of(expected)
    assert cached_of(answers) == all_hit(PROMPTS)


def test_garbled_and_swapped_blocks_are_misses(lab: Lab, expected: list[Answer], folder: Path) -> None:
    """Every block: half of them have another's bytes, the others a few wrong ones."""
    blocks = sorted(disk_rig.places(folder / WORKER).values())
    payloads = [path.read_bytes()[offset : offset + nbytes] for path, offset, nbytes in blocks]
    half = len(blocks) // 4 * 2
    for index, (path, offset, nbytes) in enumerate(blocks):
        if index < half:
            disk_rig.overwrite(path, offset, payloads[index ^ 1])
        else:
            middle = payloads[index][nbytes // 2 :][:8]
            disk_rig.overwrite(path, offset + nbytes // 2, bytes(255 - byte for byte in middle))
    with lab.engine(_keeping(folder)) as engine:
        engine.generate(make_prompts(1, first_length=10, seed=1))  # by now the engine knows what the folder has
        answers = engine.generate(PROMPTS)
        assert tokens_of(answers) == tokens_of(expected)
        assert cached_of(answers) == none_hit(PROMPTS)
        dropped = set(blocks).difference(disk_rig.places(folder / WORKER).values())
        assert len(dropped) >= sum(all_hit(PROMPTS)) // BLOCK, "they were not even read"
        engine.reset()
        again = engine.generate(PROMPTS)
    assert tokens_of(again) == tokens_of(expected)
    assert cached_of(again) == all_hit(PROMPTS), "what was computed instead was not saved"
