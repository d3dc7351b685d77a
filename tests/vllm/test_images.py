"""Requests with images in real engines: what is kept of them is found by their content, and by nothing else."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import tiny_paddleocr
from engine_lab import Engine, Lab
from tiny_paddleocr import END, IMAGE, START, TOKEN_PIXELS
from vllm_rig import BLOCK, Picture, cached_of, settings, tokens_of, transfer

from cache_pool import CachePool

Prompt = tuple[list[int], list[Picture]]


@pytest.fixture(scope="module")
def sighted(lab: Lab) -> Path:
    tiny_paddleocr.make(lab.home / "paddleocr", seed=0)
    return lab.home / "paddleocr"


def picture(seed: int, width: int, height: int) -> Picture:
    """:param width: in tokens, as is the height."""
    return Picture(seed, width * TOKEN_PIXELS, height * TOKEN_PIXELS)


CAT, DOG, COW = (picture(seed, 10, 10) for seed in (1, 2, 3))
"""Pictures of 100 tokens, so that they span blocks."""
ANT, BEE = picture(4, 2, 2), picture(5, 2, 2)
"""Two of them fit into a block."""
WIDE, HIGH = picture(0, 9, 4), picture(0, 4, 9)
"""Pictures with the same pixels and number of tokens: only their grids differ, and so the positions of all that
follows."""


def prompt(*parts: int | Picture) -> Prompt:
    """Texts, as their numbers of tokens, and pictures. No text goes on like another one of its prompt."""
    tokens: list[int] = []
    for number, part in enumerate(parts):
        if isinstance(part, Picture):
            tokens += [START, IMAGE, END]
        else:
            tokens += [(7 * i * i + 3 * i + 11 * number) % 2000 + 3 for i in range(part)]
    return tokens, [part for part in parts if isinstance(part, Picture)]


ASKED = [
    prompt(40, CAT, 60),
    prompt(40, DOG, 60),
    prompt(31, CAT, 45),  # from the first token of a block
    prompt(30, CAT, 45),  # from the last one
    prompt(5, CAT, 20, DOG, 30),
    prompt(5, DOG, 20, CAT, 30),
    prompt(38, ANT, 3, BEE, 80),
    prompt(38, BEE, 3, ANT, 80),
    prompt(50, WIDE, 50),
    prompt(50, HIGH, 50),
]
STRANGERS = [
    prompt(40, COW, 60),
    prompt(5, CAT, 20, COW, 30),
    prompt(5, COW, 20, DOG, 30),
    prompt(38, ANT, 3, ANT, 80),
    prompt(41, CAT, 60),
]
KNOWN_OF_STRANGERS = [1, 4, 0, 1, 1]
"""Their leading blocks that others have as well: those before the first picture that differs, or is elsewhere."""


def generate(
    engine: Engine, prompts: Sequence[Prompt], names: Sequence[str] | None = None
) -> tuple[list[list[int]], list[int]]:
    """What is answered to each, and how many blocks of it were not computed.

    :param names: of all their pictures, one after the other.
    """
    named = iter(names or ())
    pictures = [[each._replace(name=next(named, None)) for each in seen] for _, seen in prompts]
    answers = engine.generate([tokens for tokens, _ in prompts], num_tokens=16, pictures=pictures)
    return tokens_of(answers), [number // BLOCK for number in cached_of(answers)]


def num_blocks(prompt: Prompt) -> int:
    """That a full hit spares."""
    tokens, pictures = prompt
    side = TOKEN_PIXELS
    return (len(tokens) - 1 + sum(each.width * each.height // side**2 - 1 for each in pictures)) // BLOCK


def test_images_meet_by_content_alone(lab: Lab, pool: CachePool, sighted: Path) -> None:
    connector = transfer(settings(pool={"address": pool.address}))
    num_pictures = sum(len(seen) for _, seen in [*ASKED, *STRANGERS])
    one_name, many_names = ["mine"] * num_pictures, [f"mine {number}" for number in range(num_pictures)]
    with lab.engine(model=sighted) as engine:
        wanted, _ = generate(engine, ASKED)
        strangers, _ = generate(engine, STRANGERS)
        assert len({tuple(tokens) for tokens in [*wanted, *strangers]}) == len(wanted) + len(strangers)
        # Without its cache of processed images, vLLM believes whoever calls two of them by the same name.
        engine.restart(connector, mm_processor_cache_gb=0, max_num_batched_tokens=64)
        answers, _ = generate(engine, ASKED, one_name)
        assert answers == wanted
    with lab.engine(connector, model=sighted, processes=True) as engine:
        answers, cached = generate(engine, ASKED, many_names)
        assert (answers, cached) == (wanted, [num_blocks(each) for each in ASKED])
        answers, cached = generate(engine, STRANGERS)
        assert (answers, cached) == (strangers, KNOWN_OF_STRANGERS)
