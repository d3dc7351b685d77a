"""`kvtier bench invariant`: whether answers depend on the cache, or on what is computed beside them."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated

import typer

from kvtier.cli.options import Json
from kvtier.errors import KvtierError
from kvtier.system.working_folder import working_folder
from kvtier_bench.cases.invariant_conditions import chosen_families
from kvtier_bench.measuring.report import Case, report
from kvtier_bench.measuring.rounds import progress
from kvtier_bench.processes.pool_process import PoolProcess, pool_process

if TYPE_CHECKING:
    from kvtier_bench.cases.invariant_serving import Comparison, Outcome
    from kvtier_engine.model.model_folder import ModelFolder

_POOL_BYTES = 2 << 30
_SHARING = 3
"""Every so manieth prompt begins as the one before it."""
_COLUMNS = {
    "logits": "num_logits", "differ": "num_different_logits", "by up to": "largest_difference",
    "tokens": "num_tokens", "differ ": "num_different_tokens",
}  # fmt: skip
"""Headings of the table, and the figures below them."""


def bench_invariant(
    model: Annotated[Path | None, typer.Option(help="Hugging Face folder or GGUF file; default: SmolLM2-135M.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="bfloat16 or float32, repeatable. Default: both.")] = None,
    threads: Annotated[list[int] | None, typer.Option(help="Threads, repeatable. Default: 1 and 2.")] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of random tokens.")] = 60,
    prompt_tokens: Annotated[int, typer.Option(min=20, help="Tokens of the longest prompt.")] = 256,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the answer to each prompt.")] = 6,
    only: Annotated[list[str] | None, typer.Option(help="Only conditions with this in their name.")] = None,
    batch_invariant: Annotated[bool, typer.Option(help="Or what differs without it.")] = True,
    json: Json = False,
) -> None:
    """Compare logits bit for bit: of prompts that nothing is cached of, and of the same prompts in other ways.

    Cached on the device, in host memory, in a pool and on disk; in chunks and batches of other sizes; and after a
    preemption. Ends with code 1 if any bit differs.
    """
    dtypes = dtype or ["bfloat16", "float32"]
    if unknown := set(dtypes) - {"bfloat16", "float32"}:
        raise KvtierError(f"--dtype {', '.join(sorted(unknown))}: there are bfloat16 and float32")
    families = chosen_families(only)
    # Imported here, so that the command line does not load torch for other commands.
    from kvtier_engine.demo.demo_model import demo_model_path
    from kvtier_engine.model.model_folder import open_model

    folder = open_model(model or demo_model_path())
    asked = draw_prompts(Random(0), folder.config.vocab_size, num_prompts=prompts, longest=prompt_tokens)
    runs = [(each, count) for each in dtypes for count in threads or [1, 2]]
    cases, notes = list[Case](), list[str]()
    with ExitStack() as stack:
        num_passes = 1 + sum(len(family.names) for family in families)
        advance = stack.enter_context(progress("prompts", len(runs) * num_passes * prompts))
        for of_dtype, num_threads in runs:
            with working_folder() as place, pool_process(place, _POOL_BYTES) as pool:
                comparison = _comparison(
                    (folder, of_dtype, num_threads, batch_invariant), asked, answer_tokens, (pool, place), advance
                )
                outcomes = comparison.run(families)
            cases += [case_of(outcome, f"{of_dtype}, threads: {num_threads}") for outcome in outcomes]
            notes += [f"{of_dtype}, threads: {num_threads}, {words}" for each in outcomes for words in each.named]
    title = "The same prompts, " + ("batch invariant" if batch_invariant else "not batch invariant")
    report(title, cases, as_json=json, notes=notes, columns=_COLUMNS)
    if num_different := sum(int(case.figures["num_different_logits"]) for case in cases):
        total = sum(int(case.figures["num_logits"]) for case in cases)
        raise KvtierError(f"{num_different:,} of {total:,} vectors of logits differ")


def draw_prompts(chance: Random, vocab_size: int, *, num_prompts: int, longest: int) -> list[list[int]]:
    """Prompts of random tokens, one of them the longest. Some begin as others do, up to a place inside a block."""
    drawn: list[list[int]] = []
    for number in range(num_prompts):
        length = chance.randint(8, longest) if number else longest
        tokens = [chance.randrange(vocab_size) for _ in range(length)]
        if number % _SHARING == _SHARING - 1:
            shared = chance.randint(1, min(length, len(drawn[-1])) - 1)
            tokens[:shared] = drawn[-1][:shared]
        drawn.append(tokens)
    return drawn


def _comparison(
    how: "tuple[ModelFolder, str, int, bool]",
    prompts: Sequence[list[int]],
    answer_tokens: int,
    lower: tuple[PoolProcess, Path],
    on_prompt: Callable[[], None],
) -> "Comparison":
    """:param how: the model, its dtype, the number of threads, and whether it is batch invariant."""
    import torch

    from kvtier_bench.cases.invariant_serving import Comparison, WatchedModel
    from kvtier_engine.model.fingerprint import arithmetic_fingerprint
    from kvtier_engine.model.paged_kv import kv_namespace
    from kvtier_engine.model.weights import load_weights

    folder, name, num_threads, batch_invariant = how
    dtype = getattr(torch, name)
    torch.set_num_threads(num_threads)
    weights = load_weights(folder.weight_files, folder.config, dtype)
    model = WatchedModel(folder.config, weights, batch_invariant=batch_invariant)
    fingerprint = arithmetic_fingerprint(model, folder.config, dtype) if batch_invariant else ""
    namespace = kv_namespace(folder.config, folder.weights_digest, dtype, fingerprint=fingerprint)
    pool, place = lower
    return Comparison(
        model,
        namespace,
        prompts,
        answer_tokens=answer_tokens,
        pool=pool,
        folder=place / "disk",
        on_prompt=on_prompt,
    )


def case_of(outcome: "Outcome", op: str) -> Case:
    """A row of the report."""
    counts = {key: value for key, value in outcome.counts.items() if value}
    figures = {
        "num_logits": outcome.num_logits,
        "num_different_logits": outcome.num_different_logits,
        "largest_difference": outcome.largest_difference,
        "num_tokens": outcome.num_tokens,
        "num_different_tokens": outcome.num_different_tokens,
        **{key if key == "preemptions" else f"cached_tokens_{key}": value for key, value in counts.items()},
    }
    return Case(
        outcome.condition,
        op,
        detail=", ".join(f"{key} {value:,}" for key, value in counts.items()),
        figures=figures,
    )
