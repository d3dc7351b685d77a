"""`kvtier bench branches`: eight answers to one long prompt, as one request and as eight."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated

import typer

from kvtier.cli.options import Json
from kvtier.clock import MONOTONIC
from kvtier_bench.cases.scheduling import config_of
from kvtier_bench.measuring.report import Case, Spread, report
from kvtier_bench.measuring.rounds import percentile, progress
from kvtier_bench.vllm.contenders import BLOCK
from kvtier_bench.vllm.engine_process import EngineProcess
from kvtier_bench.vllm.plain_engine import vllm_engine

if TYPE_CHECKING:
    from kvtier_engine.scheduling.completion import Completion
    from kvtier_engine.scheduling.engine import Engine

FLOOR, ONE = "8 requests", "one with n = 1"
WAYS: Mapping[str, tuple[int, int]] = {FLOOR: (8, 1), "one with n = 8": (1, 8), ONE: (1, 1)}
"""Requests of the same prompt, and answers to each."""
_COLUMNS = {
    "most tokens held": "most_tokens_held", "computed": "computed_prompt_tokens",
    "TTFT p50, s": "ttft_p50_s", "tokens/s": "answer_tokens_per_s",
}  # fmt: skip
"""Headings of the table, and the figures below them."""
_TOKENS_PER_BLOCK = 16


@dataclass(slots=True)
class _Measured:
    """What one way took, round by round."""

    seconds: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    """The median of a round's answers."""
    num_tokens_held: list[int] = field(default_factory=list)
    """The tokens that the device blocks have room for which were taken at a time, at most."""
    num_computed: list[int] = field(default_factory=list)
    """Prompt tokens."""


def bench_branches(
    model: Annotated[Path | None, typer.Option(help="Hugging Face folder or GGUF file; default: SmolLM2-135M.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    threads: Annotated[int, typer.Option(help="Threads of a forward pass; 0 takes one per core.")] = 0,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 3000,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Counted rounds.")] = 3,
    beside_vllm: Annotated[
        bool, typer.Option("--vllm", help="And with vLLM: .venv/vllm/bin/kvtier runs that.")
    ] = False,
    json: Json = False,
) -> None:
    """Draw answers to a prompt that nobody has computed, with blocks of 16 tokens.

    All ways take turns in each round, with the engine's default order: prompts that arrive together are computed once.
    With --vllm, vLLM answers n = 8 in its turn, with as many threads, and blocks of 32 tokens, which are the smallest
    that it computes quickly on the CPU.
    """
    # Imported here, so that the command line does not load torch for other commands.
    from kvtier_engine.assemble import assembled_engine
    from kvtier_engine.demo.demo_model import demo_model_path

    measured = {name: _Measured() for name in WAYS}
    room = 8 * (prompt_tokens + answer_tokens + 16)
    path = model or demo_model_path()
    config = config_of(path, dtype, threads, room, {"order": "cache_aware"})
    with ExitStack() as stack:
        assembled = stack.enter_context(assembled_engine(config))
        serve: dict[str, Callable[[list[int]], None]] = {
            name: partial(_serve, assembled.engine, answer_tokens, way, measured[name]) for name, way in WAYS.items()
        }
        if beside_vllm:
            longest = prompt_tokens + answer_tokens
            name, engine = stack.enter_context(vllm_engine(path, dtype, threads, room, longest_tokens=longest))
            measured[f"{name} with n = 8"] = into = _Measured()
            serve[f"{name} with n = 8"] = partial(_serve_vllm, engine, answer_tokens, into)
        vocab_size = assembled.model.config.vocab_size
        advance = stack.enter_context(progress("rounds", rounds))
        for number in range(rounds):
            chance = Random(number)
            prompt = [chance.randrange(vocab_size) for _ in range(prompt_tokens)]
            for name in list(serve)[:: -1 if number % 2 else 1]:
                serve[name](prompt)
            advance()
    title = f"Eight answers of {answer_tokens} tokens to a prompt of {prompt_tokens:,}, {dtype}"
    cases = [_case(name, measured, answer_tokens) for name in measured]
    report(title, cases, as_json=json, columns=_COLUMNS)


def _serve_vllm(engine: EngineProcess, answer_tokens: int, into: _Measured, prompt: list[int]) -> None:
    found = engine.branch(prompt, num_branches=8, max_tokens=answer_tokens, seed=0)
    into.seconds.append(found["seconds"])
    into.ttft_s.append(found["ttft_s"])
    into.num_tokens_held.append(int(found["most_blocks"]) * BLOCK)
    into.num_computed.append(int(found["num_computed"]))


def _serve(engine: "Engine", answer_tokens: int, way: tuple[int, int], into: _Measured, prompt: list[int]) -> None:
    from kvtier_engine.scheduling.sampling_params import Sampling

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
    into.num_tokens_held.append(most * _TOKENS_PER_BLOCK)
    firsts = [each for each in done if each.branch == 0]
    into.num_computed.append(sum(len(prompt) - sum(each.cached_by_tier.values()) for each in firsts))


def _case(name: str, measured: Mapping[str, _Measured], answer_tokens: int) -> Case:
    ours, floor = measured[name], measured[FLOOR]
    return Case.of_rounds(
        "branches",
        name,
        ours.seconds,
        floor=(FLOOR, floor.seconds),
        unit="round",
        figures={
            "ttft_p50_s": Spread.of(ours.ttft_s).median_s,
            "answer_tokens_per_s": (1 if name == ONE else 8) * answer_tokens / Spread.of(ours.seconds).median_s,
            "most_tokens_held": Spread.of(ours.num_tokens_held).median_s,
            "computed_prompt_tokens": Spread.of(ours.num_computed).median_s,
        },
    )
