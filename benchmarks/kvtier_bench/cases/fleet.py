"""`kvtier bench fleet`: strategies of the gateway before three real engines, beside the simulator's word for them."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Annotated

import typer

from kvtier.cli.options import Json, Plot
from kvtier.errors import KvtierError
from kvtier.system.working_folder import working_folder
from kvtier.traces.form import Trace
from kvtier_bench.cases.fleet_load import Answered, Shape, trace_of
from kvtier_bench.measuring.report import Case, Spread, held_against, ratios, report
from kvtier_bench.measuring.rounds import percentile, progress
from kvtier_gateway.fleet.fleet import Fleet, Site
from kvtier_gateway.fleet.hardware import EngineModel, PoolModel
from kvtier_gateway.fleet.workload import workload
from kvtier_gateway.routing.registry import STRATEGIES, make_strategy
from kvtier_gateway.routing.values import Prices

FLOOR = "round_robin, no pool"
_BEST = "priced, pool"
_BAR = 1.5
_KV_BYTES_PER_TOKEN = {"bfloat16": 23_040, "float32": 46_080}
_COPY_BYTES_PER_S = 1e9
"""What the simulator takes for host memory and for the pool on the same host: far faster than computing here."""


@dataclass(slots=True)
class _Way:
    """A strategy, with or without the pool, and what it took."""

    strategy: str
    with_pool: bool
    rounds: list[list[Answered]] = field(default_factory=list)
    simulated_s: list[float] = field(default_factory=list)
    """90th percentiles of the simulator."""

    @property
    def name(self) -> str:
        return f"{self.strategy}, {'pool' if self.with_pool else 'no pool'}"

    def p90_s(self) -> list[float]:
        """Returns the 90th percentile of the seconds to the first token, round by round."""
        return [percentile([each.ttft_s for each in answers], 90) for answers in self.rounds]

    def all_s(self) -> list[float]:
        """Returns the seconds to the first token of all requests of all rounds."""
        return [each.ttft_s for answers in self.rounds for each in answers]


def bench_fleet(
    json: Json = False,
    plot: Plot = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each strategy, in turn.")] = 2,
    load: Annotated[
        float, typer.Option(min=0.1, help="Offered tokens over what engines compute without a cache.")
    ] = 0.8,
    sessions: Annotated[int, typer.Option(min=1, help="Conversations of a round.")] = 10,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each session.")] = 5,
    strategies: Annotated[str, typer.Option(help="Beside round_robin without the pool; with commas.")] = (
        "priced,least_loaded,round_robin"
    ),
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
) -> None:
    """Serve conversations of several turns with three engines of SmolLM2-135M, one thread each, behind the gateway.

    In turn by each strategy with the pool, and by round_robin and priced without it: requests are sent when they are
    due, whatever has become of those before. Every round has prompts that no engine has seen. The simulator is given
    the same requests, three engines, and what a token and a step were measured to take.
    """
    names = [name.strip() for name in strategies.split(",")]
    if unknown := set(names) - set(STRATEGIES):
        raise KvtierError(f"no strategy {', '.join(sorted(unknown))}: there are {', '.join(STRATEGIES)}")
    if dtype not in _KV_BYTES_PER_TOKEN:
        raise KvtierError(f"--dtype {dtype}: name one of {', '.join(_KV_BYTES_PER_TOKEN)}")
    # Imported here, so that the command line does not load torch for other commands.
    from kvtier_bench.cases.fleet_rig import NUM_ENGINES, FleetRig

    ways = [_Way("round_robin", False), _Way("priced", False), *(_Way(name, True) for name in names)]
    shape = Shape(sessions, turns)
    with working_folder() as folder, ExitStack() as stack:
        rig = FleetRig(folder, dtype, stack)
        token_s, step_s = rig.speeds()
        model = _model(token_s, step_s, dtype)
        duration_s = shape.num_tokens * token_s / (NUM_ENGINES * load)
        with progress("rounds", rounds * len(ways)) as advance:
            for number in range(rounds):
                for place, way in enumerate(ways):
                    trace = trace_of(shape, duration_s, 1 + number * len(ways) + place)
                    way.rounds.append(rig.run(way.strategy, way.with_pool, trace.requests))
                    way.simulated_s.append(_simulated_p90_s(way, trace, model, NUM_ENGINES))
                    advance()
    notes = [
        f"A token of a prompt takes {token_s * 1e3:.2f} ms while all engines compute, a step {step_s * 1e3:.0f} ms; "
        f"{shape.sessions * shape.turns} requests in {duration_s:.0f} s a round."
    ]
    cases = [_case(way, ways[0], shape) for way in ways]
    report("Strategies before three engines", cases, as_json=json, plot=plot, notes=[*notes, *_notes(ways, cases)])


def _model(token_s: float, step_s: float, dtype: str) -> EngineModel:
    from kvtier_bench.cases.fleet_rig import BATCH_TOKENS, HOST_BYTES, KV_BYTES

    prices = Prices(token_s, 0.0, 0.0, _KV_BYTES_PER_TOKEN[dtype], _COPY_BYTES_PER_S)
    return replace(
        EngineModel(),
        compute=prices,
        step_s=step_s,
        kv_byte_s=0.0,
        chunk_tokens=BATCH_TOKENS,
        device_bytes=KV_BYTES,
        host_bytes=HOST_BYTES,
    )


def _simulated_p90_s(way: _Way, trace: Trace, model: EngineModel, num_engines: int) -> float:
    """Simulates the same requests at the same times."""
    work = workload(trace, model.compute, 0)
    as_it_is = work.compute_s / (work.duration_s * num_engines)
    pool = PoolModel(_COPY_BYTES_PER_S if way.with_pool else 0.0, oversubscription=1.0)
    site = Site(num_engines, as_it_is, pool, model)
    return Fleet(site, work, lambda _: make_strategy(way.strategy)).run().summary().ttft_p90_s


def _case(way: _Way, floor: _Way, shape: Shape) -> Case:
    """Times are of first tokens; the ratio is that of the 90th percentiles, round by round."""
    all_s, cached = way.all_s(), sum(each.num_cached for answers in way.rounds for each in answers)
    figures = {
        "ttft_p50_s": percentile(all_s, 50),
        "ttft_p90_s": percentile(all_s, 90),
        "simulated_ttft_p90_s": Spread.of(way.simulated_s).median_s,
        "cached_share": cached / (shape.num_tokens * len(way.rounds)),
    }
    detail = ", ".join(f"{value:,.2f} {name.replace('_', ' ')}" for name, value in figures.items())
    against = {} if way is floor else held_against(floor.name, ratios(floor.p90_s(), way.p90_s()))
    return Case(
        way.name,
        f"{shape.sessions} conversations of {shape.turns} turns",
        p50_us=percentile(all_s, 50) * 1e6,
        p99_us=percentile(all_s, 99) * 1e6,
        rounds=len(way.rounds),
        unit="first token",
        detail=detail,
        figures=figures,
        **against,
    )


def _notes(ways: Sequence[_Way], cases: Sequence[Case]) -> list[str]:
    """The bar, and both orders from the best to the worst."""
    real = sorted(cases, key=lambda case: case.figures["ttft_p90_s"])
    simulated = sorted(cases, key=lambda case: case.figures["simulated_ttft_p90_s"])
    notes = [
        f"Order by the 90th percentile, real: {'; '.join(case.name for case in real)}.",
        f"Order by the 90th percentile, simulated: {'; '.join(case.name for case in simulated)}.",
    ]
    p90_s = {case.name: case.figures["ttft_p90_s"] for case in cases}
    if _BEST in p90_s:
        ratio = p90_s[FLOOR] / p90_s[_BEST]
        notes.append(f"{'held' if ratio >= _BAR else 'MISSED'}: {_BEST} {ratio:.2f} times {FLOOR} (at least {_BAR})")
    return notes
