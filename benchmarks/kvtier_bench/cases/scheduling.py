"""`kvtier bench scheduling`: requests that share prefixes, by order of arrival and by what is cached."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
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

if TYPE_CHECKING:
    from kvtier_engine.scheduling.engine import Engine
    from kvtier_engine.scheduling.request import Completion

FLOOR = "fcfs, whole blocks"
ENGINES: Mapping[str, Mapping[str, Any]] = {
    FLOOR: {"order": "fcfs", "partial_reuse": False},
    "fcfs, parts of blocks": {"order": "fcfs", "partial_reuse": True},
    "cache_aware, parts of blocks": {"order": "cache_aware", "partial_reuse": True},
}
"""The settings of each engine, by name."""
_MAX_RUNNING = 8

Turn = tuple[int, list[int], Callable[["Completion"], "list[Turn]"]]
"""The turn's own number in its round, its prompt, and what follows when it is answered."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one round. The same seed gives the same prompts."""

    turns: Callable[[Random, int], list[Turn]]
    """Takes the source of chance and the vocabulary's size, and returns what arrives first, all at once."""
    answer_tokens: int


def _tokens(chance: Random, vocab_size: int, count: int) -> list[int]:
    return [chance.randrange(vocab_size) for _ in range(count)]


def _conversations(chance: Random, vocab_size: int) -> list[Turn]:
    """Twelve conversations of five turns after one system prompt; each turn follows at once on the answer before."""
    system = _tokens(chance, vocab_size, 100)
    users = [[_tokens(chance, vocab_size, 50) for _ in range(5)] for _ in range(12)]

    def turn(number: int, history: list[int], left: list[list[int]]) -> list[Turn]:
        if not left:
            return []
        prompt = history + left[0]
        return [(number, prompt, lambda done: turn(number + 1, [*prompt, *done.token_ids], left[1:]))]

    begins = [system + _tokens(chance, vocab_size, 70) for _ in users]
    return [first for i, each in enumerate(users) for first in turn(10 * i, begins[i], each)]


def _documents(chance: Random, vocab_size: int) -> list[Turn]:
    """Forty questions of 20 tokens on eight documents of 450, in any order."""
    documents = [_tokens(chance, vocab_size, 450) for _ in range(8)]
    asked = [documents[number % 8] + _tokens(chance, vocab_size, 20) for number in range(40)]
    chance.shuffle(asked)
    return [(number, prompt, lambda _: []) for number, prompt in enumerate(asked)]


WORKLOADS: Mapping[str, Workload] = {
    "12 conversations x 5 turns": Workload(_conversations, answer_tokens=16),
    "40 questions on 8 documents": Workload(_documents, answer_tokens=8),
}


@dataclass(slots=True)
class _Measured:
    """What one engine took for one workload, round by round."""

    seconds: list[float] = field(default_factory=list)
    ttft_s: list[list[float]] = field(default_factory=list)
    num_computed: list[int] = field(default_factory=list)
    """Prompt tokens."""
    num_answered: int = 0
    """Answer tokens of a round."""
    answers: list[list[tuple[int, ...]]] = field(default_factory=list)


def bench_scheduling(
    model: Annotated[Path | None, typer.Option(help="Hugging Face folder or GGUF file; default: SmolLM2-135M.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    threads: Annotated[int, typer.Option(help="Threads of a forward pass; 0 takes one per core.")] = 0,
    kv_tokens: Annotated[int, typer.Option(min=1024, help="Tokens that the device has room for.")] = 6144,
    rounds: Annotated[int, typer.Option(min=1, help="Counted rounds.")] = NUM_ROUNDS,
    only: Annotated[list[str] | None, typer.Option(help="Only workloads with this in their name.")] = None,
    json: Json = None,
) -> None:
    """Serve the same requests in turn with engines that differ in their order and in what they reuse.

    Workloads: conversations that go on at once, and questions on documents that all arrive together. Random tokens;
    nothing is cached when a round begins.
    """
    chosen = {name: each for name, each in WORKLOADS.items() if not only or any(part in name for part in only)}
    if not chosen:
        raise KvtierError(f"no workload with {', '.join(only or [])} in its name: there are {', '.join(WORKLOADS)}")
    # Imported here, so that the command line does not load torch for other commands.
    from kvtier_engine.assemble import assembled_engine
    from kvtier_engine.demo.demo_model import demo_model_path

    path = model or demo_model_path()
    measured = {(work, name): _Measured() for work in chosen for name in ENGINES}
    with ExitStack() as stack:
        assembled = {
            name: stack.enter_context(assembled_engine(config_of(path, dtype, threads, kv_tokens, settings)))
            for name, settings in ENGINES.items()
        }
        advance = stack.enter_context(progress("rounds", rounds * len(chosen)))
        for number in range(rounds):
            for work, workload in chosen.items():
                for name in list(ENGINES)[:: -1 if number % 2 else 1]:
                    engine, vocab_size = assembled[name].engine, assembled[name].model.config.vocab_size
                    _serve(engine, workload, Random(number), vocab_size, measured[work, name])
                advance()
    report(
        f"Requests that share prefixes, {dtype}",
        [_case(work, name, measured) for work, name in measured],
        as_json=json,
        notes=[_same_answers(work, measured) for work in chosen],
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
                "max_running": _MAX_RUNNING,
                **settings,
            },
            "host": {"capacity_bytes": "64MiB"},
        },
        source="kvtier bench scheduling",
        environ={"BENCH_SECRET": "of a benchmark, shared with nobody"},
    )


def _serve(engine: "Engine", workload: Workload, chance: Random, vocab_size: int, into: _Measured) -> None:
    """Serves one round from an empty cache, and adds what it took."""
    from kvtier_engine.scheduling.request import Sampling

    forgotten: list[int | None] = []
    engine.reset_cache(forgotten.append)
    engine.run_until(lambda: bool(forgotten))
    ended: dict[int, Completion] = {}
    num_open = 0
    sampling = Sampling(max_tokens=workload.answer_tokens)

    def submit(turn: Turn) -> None:
        nonlocal num_open
        turn_number, prompt, follow = turn
        num_open += 1

        def on_done(done: "Completion") -> None:
            nonlocal num_open
            num_open -= 1
            ended[turn_number] = done
            for following in follow(done):
                submit(following)

        engine.submit(prompt, sampling, MONOTONIC(), on_done)

    turns = workload.turns(chance, vocab_size)
    began_s = MONOTONIC()
    for turn in turns:
        submit(turn)
    engine.run_until(lambda: num_open == 0)
    into.seconds.append(MONOTONIC() - began_s)
    into.ttft_s.append([done.ttft_s or 0.0 for done in ended.values()])
    into.num_computed.append(sum(done.num_prompt_tokens - sum(done.cached_by_tier.values()) for done in ended.values()))
    into.num_answered = sum(len(done.token_ids) for done in ended.values())
    into.answers.append([ended[turn_number].token_ids for turn_number in sorted(ended)])


def _case(work: str, name: str, measured: Mapping[tuple[str, str], _Measured]) -> Case:
    ours, floor = measured[work, name], measured[work, FLOOR]

    def ttft(of: _Measured, percent: float) -> list[float]:
        return [percentile(values, percent) for values in of.ttft_s]

    figures = {
        "ttft_p50_s": Spread.of(ttft(ours, 50)).median_s,
        "ttft_p90_s": Spread.of(ttft(ours, 90)).median_s,
        "ttft_p50_ratio": ratios(ttft(floor, 50), ttft(ours, 50)).median_s,
        "ttft_p90_ratio": ratios(ttft(floor, 90), ttft(ours, 90)).median_s,
        "answer_tokens_per_s": ours.num_answered / Spread.of(ours.seconds).median_s,
        "computed_prompt_tokens": Spread.of(ours.num_computed).median_s,
    }
    return Case.of_rounds(work, name, ours.seconds, floor=(FLOOR, floor.seconds), unit="round", figures=figures)


def _same_answers(work: str, measured: Mapping[tuple[str, str], _Measured]) -> str:
    """How many answers are those of the first engine: in float32 all, in bfloat16 all but near ties."""

    def answers(name: str) -> Sequence[tuple[int, ...]]:
        return [answer for of_round in measured[work, name].answers for answer in of_round]

    floor = answers(FLOOR)
    parts = [
        f"{sum(a == b for a, b in zip(answers(name), floor, strict=False))} of {len(floor)} by {name}"
        for name in ENGINES
        if name != FLOOR
    ]
    return f"{work}: the same answers as {FLOOR}: {', '.join(parts)}"
