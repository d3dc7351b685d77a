"""`kvtier bench stall`: what an engine's steps cost beside a pool that hangs, is slow, flaps or answers garbage."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtier.cli.options import Json
from kvtier.clock import MONOTONIC
from kvtier.config import Config, parse_config
from kvtier.errors import KvtierError
from kvtier.system.working_folder import working_folder
from kvtier.testing.faulty_link import LinkFault
from kvtier_bench.measuring.blocks import TENANT
from kvtier_bench.measuring.report import Case, Spread, ratios, report
from kvtier_bench.measuring.rounds import NUM_ROUNDS, percentile, progress
from kvtier_bench.measuring.timed_calls import TimedCalls
from kvtier_bench.processes.link_process import LinkProcess
from kvtier_bench.processes.pool_process import pool_process

if TYPE_CHECKING:
    from kvtier_engine.assemble import AssembledEngine

FLOOR = "no pool"
STATES: Mapping[str, Mapping[str, Any]] = {
    "healthy": {"kind": None},
    "black hole": {"kind": LinkFault.BLACK_HOLE},
    "slow": {"kind": LinkFault.LATENCY, "delay_s": 2.0},
    "flapping": {"kind": LinkFault.RESET, "flaps": True},
    "garbage": {"kind": LinkFault.GARBAGE},
}
"""What the pool does, by name; slow is 2 s a piece of a request and of its answer."""
_POOL_BYTES = 1 << 30
_NUM_WARM_UPS = 4
"""Requests before any is counted: one more than failures open the breaker."""
_MOST_STEP_RATIO, _MOST_CALLS_S = 1.05, 0.010
"""The bar: a step beside the pool by one without, and the 99.9th percentile of the time inside of calls in a step."""
_CALLS = (
    *("start_lookup", "poll_lookup", "cancel_lookup", "plan_fetch", "note_computed", "start_load", "start_save"),
    *("save_full", "note_hits", "worth_saving", "cancel", "poll", "nudge", "holds"),
)
"""All that the engine's thread calls but `wait`, which it calls when there is nothing to compute."""


@dataclass(slots=True)
class _Engine:
    """What was measured of one engine, request by request."""

    steps_s: list[float] = field(default_factory=list)
    """The mean time of a step: one for each token, the first with the prompt."""
    requests_s: list[float] = field(default_factory=list)
    """The time from a request to its last token."""
    calls_s: list[float] = field(default_factory=list)
    """Time inside of calls of the cache, of each step."""
    num_cached: int = 0
    """Tokens that were found in the pool."""


def bench_stall(
    model: Annotated[Path | None, typer.Option(help="Hugging Face folder or GGUF file; default: SmolLM2-135M.")] = None,
    threads: Annotated[int, typer.Option(help="Threads of the engine; 0 takes one per core.")] = 0,
    pairs: Annotated[int, typer.Option(min=1, help="Counted pairs of requests of each state.")] = NUM_ROUNDS,
    prompt_tokens: Annotated[int, typer.Option(min=32, help="Tokens of each prompt, all of them new.")] = 256,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer: so many steps.")] = 64,
    only: Annotated[list[str] | None, typer.Option(help="Only this state; may be repeated.")] = None,
    json: Json = False,
) -> None:
    """Serve requests with an engine that has no pool, and in turn with one whose pool over TCP fails in some way.

    A pair is one prompt, served by both. The network between engine and pool is a process that answers nothing, two
    seconds late, nothing half of the time, or random bytes; when a pair is counted, the pool has failed several times.
    """
    chosen = only or list(STATES)
    if unknown := set(chosen) - set(STATES):
        raise KvtierError(f"no state {', '.join(sorted(unknown))}: there are {', '.join(STATES)}")
    # Imported here, so that the command line does not load torch for other commands.
    from kvtier.offload import Hierarchy
    from kvtier_bench.cases.first_token import Prompts
    from kvtier_engine.assemble import assembled_engine
    from kvtier_engine.demo.demo_model import demo_model_path

    path, calls, cases = model or demo_model_path(), TimedCalls(), list[Case]()
    with working_folder() as folder, ExitStack() as stack:
        pool = stack.enter_context(pool_process(folder, _POOL_BYTES))
        link = LinkProcess(pool.tcp, stack)
        stack.enter_context(calls.of(Hierarchy, _CALLS, first="poll"))
        without = stack.enter_context(assembled_engine(_config(path, threads, pool.token, None)))
        prompts = Prompts(without.model.config.vocab_size, prompt_tokens=prompt_tokens, new_tokens=1)
        advance = stack.enter_context(progress("pairs of requests", len(chosen) * pairs))
        for state in chosen:
            link.fail(None)
            with assembled_engine(_config(path, threads, pool.token, link.address)) as beside:
                num_hurt = link.fail(**STATES[state])
                engines = {FLOOR: without, state: beside}
                measured = {name: _Engine() for name in engines}
                for _ in range(_NUM_WARM_UPS):
                    for engine in engines.values():
                        _serve(engine, prompts.fresh(), 1, calls, _Engine())
                for number in range(pairs):
                    prompt = prompts.fresh()
                    for name in list(engines)[:: -1 if number % 2 else 1]:
                        _serve(engines[name], prompt, answer_tokens, calls, measured[name])
                    advance()
                cases.append(_case(state, measured, link.fail(None) - num_hurt))
    report("An engine beside a pool that fails", cases, as_json=json, notes=_notes(cases))


def _config(model: Path, threads: int, token: str, address: str | None) -> Config:
    pool: dict[str, Any] = {} if address is None else {"pool": {"address": address}}
    return parse_config(
        {
            "tenant": TENANT,
            "tenants": {TENANT: {"secret": "env:BENCH_SECRET", "token": "env:BENCH_TOKEN"}},
            "engine": {"model": str(model.resolve()), "num_threads": threads, "kv_bytes": "128MiB"},
            "host": {"capacity_bytes": "64MiB"},
            **pool,
        },
        source="kvtier bench stall",
        environ={"BENCH_SECRET": "of a benchmark, shared with nobody", "BENCH_TOKEN": token},
    )


def _serve(
    assembled: "AssembledEngine", prompt: list[int], answer_tokens: int, calls: TimedCalls, into: _Engine
) -> None:
    """Serves one request, and adds what it took."""
    from kvtier_engine.scheduling.completion import Completion
    from kvtier_engine.scheduling.sampling_params import Sampling

    completions: list[Completion] = []
    engine, before_s = assembled.engine, _step_s(assembled)
    calls.clear()
    began_s = MONOTONIC()
    engine.submit(prompt, Sampling(max_tokens=answer_tokens), began_s, completions.append)
    engine.run_until(lambda: bool(completions))
    into.requests_s.append(MONOTONIC() - began_s)
    calls.end_step()
    into.calls_s += calls.steps_s
    into.num_cached += sum(completions[0].cached_by_tier.values())
    into.steps_s.append((_step_s(assembled) - before_s) / answer_tokens)


def _step_s(assembled: "AssembledEngine") -> float:
    """The seconds of all steps of an engine, by its own timer."""
    return assembled.registry.get_sample_value("kvtier_engine_step_seconds_total") or 0.0


def _case(state: str, measured: Mapping[str, _Engine], num_hurt: int) -> Case:
    floor, ours = measured[FLOOR], measured[state]
    calls_s = ours.calls_s or [0.0]
    figures = {
        "step_ratio": ratios(ours.steps_s, floor.steps_s).median_s,
        "request_ratio": ratios(ours.requests_s, floor.requests_s).median_s,
        "request_s": Spread.of(ours.requests_s).median_s,
        "slowest_request_s": max(ours.requests_s),
        "floor_step_us": Spread.of(floor.steps_s).median_s * 1e6,
        "calls_p50_us": percentile(calls_s, 50) * 1e6,
        "calls_p999_us": percentile(calls_s, 99.9) * 1e6,
        "calls_max_us": max(calls_s) * 1e6,
        "num_steps": len(ours.calls_s),
        "num_pieces_hurt": num_hurt,
    }
    return Case.of_rounds(state, "step", ours.steps_s, floor=(FLOOR, floor.steps_s), unit="step", figures=figures)


def _notes(cases: Sequence[Case]) -> list[str]:
    """What the figures say about the bars."""
    notes = []
    for case in cases:
        figures = case.figures
        is_held = figures["step_ratio"] <= _MOST_STEP_RATIO and figures["calls_p999_us"] <= _MOST_CALLS_S * 1e6
        notes.append(
            f"{'held' if is_held else 'missed'}: {case.name}: a step takes {figures['step_ratio']:.3f} times one "
            f"without a pool (at most {_MOST_STEP_RATIO}); in {figures['num_steps']:,} steps, calls of the cache take "
            f"{figures['calls_p999_us'] / 1e3:.2f} ms at the 99.9th percentile (at most {_MOST_CALLS_S * 1e3:.0f}), "
            f"{figures['calls_max_us'] / 1e3:.2f} at most; a request takes {figures['request_ratio']:.2f} times as "
            f"long, {figures['slowest_request_s']:.2f} s at most"
        )
    return notes
