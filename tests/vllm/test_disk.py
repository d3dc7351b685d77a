"""The disk tier of an engine that has no pool: it outlives the engine, and tells what was garbled."""

from pathlib import Path

import pytest
from vllm_rig import (
    Answer,
    Lab,
    all_hit,
    cached_of,
    make_prompts,
    none_hit,
    num_blocks,
    settings,
    tokens_of,
    transfer,
)

PROMPTS = make_prompts()


@pytest.fixture
def folder(lab: Lab, expected: list[Answer], tmp_path: Path) -> Path:
    """Has what an engine computed for `PROMPTS`."""
    with lab.engine(_keeping(tmp_path)) as engine:
        assert tokens_of(engine.generate(PROMPTS)) == tokens_of(expected)
    assert len(_files(tmp_path)) == num_blocks(PROMPTS)
    return tmp_path


def _keeping(folder: Path) -> dict[str, object]:
    return transfer(settings(disk={"directory": str(folder), "reserve_bytes": 0}))


def _files(folder: Path) -> list[Path]:
    """One per block."""
    return sorted(folder.glob("[0-9a-f][0-9a-f]/*"))


def test_a_cold_start_hits_everything(lab: Lab, expected: list[Answer], folder: Path) -> None:
    with lab.engine(_keeping(folder)) as engine:
        answers = engine.generate(PROMPTS)
    assert tokens_of(answers) == tokens_of(expected)
    assert cached_of(answers) == all_hit(PROMPTS)


def test_garbled_and_swapped_blocks_are_misses(lab: Lab, expected: list[Answer], folder: Path) -> None:
    """Every block: half of them have another's bytes, the others a few wrong ones."""
    files = _files(folder)
    half = len(files) // 4 * 2
    swapped = [path.read_bytes() for path in files[:half]]
    for index, path in enumerate(files[:half]):
        path.write_bytes(swapped[index ^ 1])
    for path in files[half:]:
        content = bytearray(path.read_bytes())
        middle = len(content) // 2
        content[middle : middle + 8] = bytes(255 - byte for byte in content[middle : middle + 8])
        path.write_bytes(content)
    with lab.engine(_keeping(folder)) as engine:
        answers = engine.generate(PROMPTS)
        assert tokens_of(answers) == tokens_of(expected)
        assert cached_of(answers) == none_hit(PROMPTS)
        engine.reset()
        again = engine.generate(PROMPTS)
    assert tokens_of(again) == tokens_of(expected)
    assert cached_of(again) == all_hit(PROMPTS), "what was computed instead was not saved"
