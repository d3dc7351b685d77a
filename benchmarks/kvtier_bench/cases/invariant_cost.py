"""`kvtier bench invariant-cost`: what it costs that answers do not depend on the cache."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtier.cli.options import Json
from kvtier.clock import MONOTONIC
from kvtier.config import Config, parse_config
from kvtier_bench.measuring.blocks import TENANT
from kvtier_bench.measuring.report import Case, Spread, report
from kvtier_bench.measuring.rounds import Samples, Subject, in_turn, timed

if TYPE_CHECKING:
    from kvtier_engine.assemble import AssembledEngine

_PLAIN = "plain"
_SETTINGS = {_PLAIN: False, "batch invariant": True}
_NEW_TOKENS = 64
_SHORT_PROMPT, _MOST_TOGETHER = 256, 8
_PAIRS = 21

_Measured = tuple[str, str]
"""What is done, and by which engine."""


def bench_invariant_cost(
    model: Annotated[Path | None, typer.Option(help="Hugging Face folder or GGUF file; default: SmolLM2-135M.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    threads: Annotated[int, typer.Option(help="Threads of a forward pass; 0 takes one per core.")] = 0,
    prompt_tokens: Annotated[int, typer.Option(min=128, help="Tokens of a long prompt.")] = 1024,
    answer_tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 32,
    pairs: Annotated[int, typer.Option(min=1, help="Counted pairs of each measurement.")] = _PAIRS,
    json: Json = False,
) -> None:
    """Time two engines in turn, one with `batch_invariant` and one without.

    Time to first token of long prompts of which nothing is cached, and of follow-ups to them; answers to prompts of 256
    tokens that are on the device, one alone and eight together.
    """
    # Imported here, so that the command line does not load torch for other commands.
    from kvtier_bench.cases.first_token import Prompts
    from kvtier_engine.assemble import assembled_engine
    from kvtier_engine.demo.demo_model import demo_model_path

    path, subjects, tokens = model or demo_model_path(), dict[_Measured, Subject](), dict[str, int]()
    with ExitStack() as stack:
        for name, invariant in _SETTINGS.items():
            engine = stack.enter_context(assembled_engine(_config(path, dtype, threads, invariant)))
            long, short = (
                Prompts(engine.model.config.vocab_size, prompt_tokens=count, new_tokens=_NEW_TOKENS)
                for count in (prompt_tokens, _SHORT_PROMPT)
            )
            known = cycle([short.fresh() for _ in range(_MOST_TOGETHER)]).__next__
            for op, draw, num_tokens, together in (
                (f"TTFT of {prompt_tokens:,} tokens", long.fresh, 1, 1),
                (f"TTFT of {_NEW_TOKENS} tokens after a hit", long.follow_up, 1, 1),
                (f"{answer_tokens} tokens of 1 answer", known, answer_tokens, 1),
                (f"{answer_tokens} tokens of {_MOST_TOGETHER} answers", known, answer_tokens, _MOST_TOGETHER),
            ):
                subjects[op, name] = Subject(timed(_asking(engine, draw, num_tokens, together)))
                tokens[op] = num_tokens * together
        # One operation after the other, each by both engines.
        ordered = sorted(subjects, key=lambda measured: list(tokens).index(measured[0]))
        samples = in_turn({each: subjects[each] for each in ordered}, rounds=pairs, label="pairs")
    cases = [_case(op, name, samples, tokens[op]) for op, name in ordered]
    report(f"batch_invariant on and off, {dtype}", cases, as_json=json, columns={"tokens/s": "tokens_per_s"})


def _asking(
    engine: "AssembledEngine", draw: Callable[[], list[int]], answer_tokens: int, together: int
) -> Callable[[], None]:
    """Asks so many requests at once, and waits for all answers."""

    def ask() -> None:
        from kvtier_engine.scheduling.completion import Completion
        from kvtier_engine.scheduling.sampling_params import Sampling

        done: list[Completion] = []
        for _ in range(together):
            engine.engine.submit(draw(), Sampling(max_tokens=answer_tokens), MONOTONIC(), done.append)
        engine.engine.run_until(lambda: len(done) == together)

    return ask


def _case(op: str, name: str, samples: Mapping[_Measured, Samples], num_tokens: int) -> Case:
    """:param num_tokens: of all answers; where there is one only, its time says more."""
    ours, plain = samples[op, name], samples[op, _PLAIN]
    floor = None if name == _PLAIN else (_PLAIN, plain)
    figures = {"tokens_per_s": num_tokens / Spread.of(ours.rounds_s).median_s} if num_tokens > 1 else {}
    return Case.of(name, op, ours, floor=floor, unit="round", figures=figures)


def _config(model: Path, dtype: str, threads: int, invariant: bool) -> Config:
    return parse_config(
        {
            "tenant": TENANT,
            "tenants": {TENANT: {"secret": "env:BENCH_SECRET"}},
            "engine": {
                "model": str(model.resolve()),
                "dtype": dtype,
                "num_threads": threads,
                "batch_invariant": invariant,
                "kv_bytes": "512MiB",
            },
            "host": {"capacity_bytes": "64MiB"},
        },
        source="kvtier bench invariant-cost",
        environ={"BENCH_SECRET": "of a benchmark, shared with nobody"},
    )
