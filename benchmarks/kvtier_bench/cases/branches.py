"""`kvtier bench branches`: eight answers to one long prompt, as one request and as eight."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated

import typer

from kvtier.cli.options import Json
from kvtier.clock import MONOTONIC
from kvtier_bench.cases.scheduling import config_of
from kvtier_bench.measuring.report import Case, Spread, report
from kvtier_bench.measuring.rounds import percentile, progress

if TYPE_CHECKING:
    from kvtier_engine.scheduling.engine import Engine
    from kvtier_engine.scheduling.request import Completion

FLOOR = "8 requests"
WAYS: Mapping[str, tuple[int, int]] = {FLOOR: (8, 1), "one with n = 8": (1, 8), "one with n = 1": (1, 1)}
"""Requests of the same prompt, and answers to each."""


@dataclass(slots=True)
class _Measured:
    """What one way took, round by round."""

    seconds: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    """The median of a round's answers."""
    num_blocks: list[int] = field(default_factory=list)
    """The most device blocks that were taken at a time."""
    num_computed: list[int] = field(default_factory=list)
    """Prompt tokens."""


def bench_branches(
    model: Annotated[Path | None, typer.Option(help="Hugging Face folder or GGUF file; default: SmolLM2-135M.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    threads: Annotated[int, typer.Option(help="Threads of a forward pass; 0 takes one per core.")] = 0,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 3000,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Counted rounds.")] = 3,
    json: Json = None,
) -> None:
    """Draw answers to a prompt that nobody has computed, with blocks of 16 tokens.

    All ways take turns in each round, with the engine's default order: prompts that arrive together are computed once.
    """
    # Imported here, so that the command line does not load torch for other commands.
    from kvtier_engine.assemble import assembled_engine
    from kvtier_engine.demo.demo_model import demo_model_path

    measured = {name: _Measured() for name in WAYS}
    room = 8 * (prompt_tokens + answer_tokens + 16)
    config = config_of(model or demo_model_path(), dtype, threads, room, {"order": "cache_aware"})
    with assembled_engine(config) as assembled, progress("rounds", rounds) as advance:
        vocab_size = assembled.model.config.vocab_size
        for number in range(rounds):
            chance = Random(number)
            prompt = [chance.randrange(vocab_size) for _ in range(prompt_tokens)]
            for name in list(WAYS)[:: -1 if number % 2 else 1]:
                _serve(assembled.engine, prompt, answer_tokens, WAYS[name], measured[name])
            advance()
    title = f"Eight answers of {answer_tokens} tokens to a prompt of {prompt_tokens:,}, {dtype}"
    report(title, [_case(name, measured) for name in measured], as_json=json)


def _serve(engine: "Engine", prompt: list[int], answer_tokens: int, way: tuple[int, int], into: _Measured) -> None:
    from kvtier_engine.scheduling.request import Sampling

    forgotten: list[int | None] = []
    engine.reset_cache(forgotten.append)
    engine.run_until(lambda: bool(forgotten))
    done: list[Completion] = []
    num_requests, num_branches = way
    num_free, most = engine.num_free_blocks, 0

    def is_over() -> bool:
        nonlocal most
        most = max(most, num_free - engine.num_free_blocks)
        return len(done) == num_requests * num_branches

    began_s = MONOTONIC()
    for seed in range(num_requests):
        sampling = Sampling(max_tokens=answer_tokens, temperature=1.0, seed=seed, num_branches=num_branches)
        engine.submit(prompt, sampling, MONOTONIC(), done.append)
    engine.run_until(is_over)
    into.seconds.append(MONOTONIC() - began_s)
    into.ttft_s.append(percentile([each.ttft_s or 0.0 for each in done], 50))
    into.num_blocks.append(most)
    firsts = [each for each in done if each.branch == 0]
    into.num_computed.append(sum(len(prompt) - sum(each.cached_by_tier.values()) for each in firsts))


def _case(name: str, measured: Mapping[str, _Measured]) -> Case:
    ours, floor = measured[name], measured[FLOOR]
    return Case.of_rounds(
        "branches",
        name,
        ours.seconds,
        floor=(FLOOR, floor.seconds),
        unit="round",
        figures={
            "ttft_p50_s": Spread.of(ours.ttft_s).median_s,
            "most_blocks": Spread.of(ours.num_blocks).median_s,
            "computed_prompt_tokens": Spread.of(ours.num_computed).median_s,
        },
    )
