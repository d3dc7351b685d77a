"""Cases of a simulation: strategies, sizes, loads and pools, each run once for every seed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.traces.form import Trace
from kvtier_gateway.fleet.figures import Summary, mean
from kvtier_gateway.fleet.fleet import Fleet, Site
from kvtier_gateway.fleet.hardware import POOLS, EngineModel, PoolSpeed
from kvtier_gateway.fleet.oracle import Oracle
from kvtier_gateway.fleet.workload import Workload, workload
from kvtier_gateway.routing.registry import STRATEGIES, make_strategy
from kvtier_gateway.routing.strategy import Strategy

ORACLE = "oracle"
NAMES = (*STRATEGIES, ORACLE)


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the results."""

    strategy: str
    """A name in `NAMES`."""
    engines: int
    load: float
    pool: PoolSpeed

    def plain(self) -> dict[str, Any]:
        """Returns the case as JSON has it."""
        return {"strategy": self.strategy, "engines": self.engines, "load": self.load, "pool": self.pool.value}


def run_case(trace: Trace, case: Case, num_seeds: int, on_progress: Callable[[int], None]) -> Summary:
    """The means over seeds 0 to `num_seeds - 1`. The same for the same arguments.

    :raises ConfigError: the trace does not say how long its prompts are.
    """
    engine = EngineModel()
    site = Site(case.engines, case.load, POOLS[case.pool], engine)
    summaries = []
    for seed in range(num_seeds):
        summaries.append(_run(site, workload(trace, engine.compute, seed), case.strategy, seed, on_progress))
    return mean(summaries)


def require_strategies(names: Sequence[str]) -> None:
    """:raises ConfigError: one of them is none."""
    for name in names:
        if name != ORACLE:
            make_strategy(name)


def _run(site: Site, work: Workload, name: str, seed: int, on_progress: Callable[[int], None]) -> Summary:
    def make(fleet: Fleet) -> Strategy:
        return Oracle(fleet.engines, seed) if name == ORACLE else make_strategy(name, seed)

    return Fleet(site, work, make).run(on_progress).summary()
