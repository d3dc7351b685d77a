"""`kvtier bench scheduling`: requests that share prefixes, by order of arrival and by what is cached."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtier.cli.options import Json
from kvtier.clock import MONOTONIC
from kvtier.config import Config, parse_config
from kvtier.errors import KvtierError
from kvtier_bench.measuring.blocks import TENANT
from kvtier_bench.measuring.report import Case, Spread, ratios, report
from kvtier_bench.measuring.rounds import NUM_ROUNDS, percentile, progress
from kvtier_bench.measuring.workloads import MAX_RUNNING, WORKLOADS, Round, Turn
from kvtier_bench.vllm.plain_engine import vllm_engine

if TYPE_CHECKING:
    from kvtier_engine.assemble import AssembledEngine
    from kvtier_engine.scheduling.completion import Completion

FLOOR = "fcfs, whole blocks"
ENGINES: Mapping[str, Mapping[str, Any]] = {
    FLOOR: {"order": "fcfs", "partial_reuse": False},
    "fcfs, parts of blocks": {"order": "fcfs", "partial_reuse": True},
    "cache_aware, parts of blocks": {"order": "cache_aware", "partial_reuse": True},
}
"""The settings of each engine, by name."""
_COLUMNS = {
    "TTFT p50, s": "ttft_p50_s", "p90, s": "ttft_p90_s",
    "tokens/s": "answer_tokens_per_s", "computed": "computed_prompt_tokens",
}  # fmt: skip
"""Headings of the table, and the figures below them."""


def bench_scheduling(
    model: Annotated[Path | None, typer.Option(help="Hugging Face folder or GGUF file; default: SmolLM2-135M.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    threads: Annotated[int, typer.Option(help="Threads of a forward pass; 0 takes one per core.")] = 0,
    kv_tokens: Annotated[int, typer.Option(min=1024, help="Tokens that the device has room for.")] = 6144,
    rounds: Annotated[int, typer.Option(min=1, help="Counted rounds.")] = NUM_ROUNDS,
    only: Annotated[list[str] | None, typer.Option(help="Only workloads with this in their name.")] = None,
    beside_vllm: Annotated[
        bool, typer.Option("--vllm", help="And with vLLM: .venv/vllm/bin/kvtier runs that.")
    ] = False,
    json: Json = False,
) -> None:
    """Serve the same requests in turn with engines that differ in their order and in what they reuse.

    Workloads: conversations that go on at once, and questions on documents that all arrive together. Random tokens;
    nothing is cached when a round begins. With --vllm, vLLM takes its turns as well: it has the same room for KV in
    blocks of 32 tokens, which are the smallest that it computes quickly on the CPU, and as many threads.
    """
    chosen = {name: each for name, each in WORKLOADS.items() if not only or any(part in name for part in only)}
    if not chosen:
        raise KvtierError(f"no workload with {', '.join(only or [])} in its name: there are {', '.join(WORKLOADS)}")
    # Imported here, so that the command line does not load torch for other commands.
    from kvtier_engine.assemble import assembled_engine
    from kvtier_engine.demo.demo_model import demo_model_path

    path = model or demo_model_path()
    rounds_of: dict[tuple[str, str], list[Round]] = defaultdict(list)
    with ExitStack() as stack:
        serve = dict[str, Callable[[str, int], Round]]()
        for name, settings in ENGINES.items():
            config = config_of(path, dtype, threads, kv_tokens, settings)
            serve[name] = partial(_serve, stack.enter_context(assembled_engine(config)))
        if beside_vllm:
            name, engine = stack.enter_context(vllm_engine(path, dtype, threads, kv_tokens))
            serve[name] = engine.serve
        advance = stack.enter_context(progress("rounds", rounds * len(chosen)))
        for number in range(rounds):
            for work in chosen:
                for name in list(serve)[:: -1 if number % 2 else 1]:
                    rounds_of[work, name].append(serve[name](work, number))
                advance()
        names = list(serve)
    report(
        f"Requests that share prefixes, {dtype}",
        [_case(work, name, rounds_of) for work in chosen for name in names],
        as_json=json,
        notes=[_same_answers(work, names, rounds_of) for work in chosen],
        columns=_COLUMNS,
    )


def config_of(path: Path, dtype: str, threads: int, kv_tokens: int, settings: Mapping[str, Any]) -> Config:
    """An engine with room for `kv_tokens` tokens on the device, 64 MiB of host memory, and these settings."""
    import torch

    from kvtier_engine.model.model_folder import DEFAULT_CACHE_DIR, open_model
    from kvtier_engine.model.paged_kv import bytes_per_block

    block_bytes = bytes_per_block(open_model(path, DEFAULT_CACHE_DIR).config, 16, getattr(torch, dtype))
    return parse_config(
        {
            "tenant": TENANT,
            "tenants": {TENANT: {"secret": "env:BENCH_SECRET"}},
            "engine": {
                "model": str(path.resolve()),
                "dtype": dtype,
                "num_threads": threads,
                "kv_bytes": block_bytes * (kv_tokens // 16),
                "max_running": MAX_RUNNING,
                **settings,
            },
            "host": {"capacity_bytes": "64MiB"},
        },
        source="kvtier bench scheduling",
        environ={"BENCH_SECRET": "of a benchmark, shared with nobody"},
    )


def _serve(assembled: "AssembledEngine", work: str, seed: int) -> Round:
    """Serves one round from an empty cache."""
    from kvtier_engine.scheduling.sampling_params import Sampling

    engine, forgotten = assembled.engine, list[int | None]()
    engine.reset_cache(forgotten.append)
    engine.run_until(lambda: bool(forgotten))
    ended: dict[int, Completion] = {}
    num_open = 0
    sampling = Sampling(max_tokens=WORKLOADS[work].answer_tokens)

    def submit(turn: Turn) -> None:
        nonlocal num_open
        num_open += 1

        def on_done(done: "Completion") -> None:
            nonlocal num_open
            num_open -= 1
            ended[turn.number] = done
            for following in turn.follow(done.token_ids):
                submit(following)

        engine.submit(turn.prompt, sampling, MONOTONIC(), on_done)

    turns = WORKLOADS[work].turns(Random(seed), assembled.model.config.vocab_size)
    began_s = MONOTONIC()
    for turn in turns:
        submit(turn)
    engine.run_until(lambda: num_open == 0)
    return Round(
        seconds=MONOTONIC() - began_s,
        ttft_s=[done.ttft_s or 0.0 for done in ended.values()],
        num_computed=sum(done.num_prompt_tokens - sum(done.cached_by_tier.values()) for done in ended.values()),
        answers=[ended[number].token_ids for number in sorted(ended)],
    )


def _case(work: str, name: str, rounds_of: Mapping[tuple[str, str], Sequence[Round]]) -> Case:
    ours, floor = rounds_of[work, name], rounds_of[work, FLOOR]
    seconds = [each.seconds for each in ours]

    def ttft(of: Sequence[Round], percent: float) -> list[float]:
        return [percentile(each.ttft_s, percent) for each in of]

    figures = {
        "ttft_p50_s": Spread.of(ttft(ours, 50)).median_s,
        "ttft_p90_s": Spread.of(ttft(ours, 90)).median_s,
        "ttft_p50_ratio": ratios(ttft(floor, 50), ttft(ours, 50)).median_s,
        "ttft_p90_ratio": ratios(ttft(floor, 90), ttft(ours, 90)).median_s,
        "answer_tokens_per_s": ours[-1].num_answered / Spread.of(seconds).median_s,
        "computed_prompt_tokens": Spread.of([each.num_computed for each in ours]).median_s,
    }
    floor_s = [each.seconds for each in floor]
    return Case.of_rounds(work, name, seconds, floor=(FLOOR, floor_s), unit="round", figures=figures)


def _same_answers(work: str, names: Sequence[str], rounds_of: Mapping[tuple[str, str], Sequence[Round]]) -> str:
    """How many answers are those of the first engine: in float32 all, in bfloat16 all but near ties."""

    def answers(name: str) -> list[tuple[int, ...]]:
        return [tuple(answer) for of_round in rounds_of[work, name] for answer in of_round.answers]

    floor = answers(FLOOR)
    parts = [
        f"{sum(a == b for a, b in zip(answers(name), floor, strict=False))} of {len(floor)} by {name}"
        for name in names
        if name != FLOOR
    ]
    return f"{work}: the same answers as {FLOOR}: {', '.join(parts)}"
