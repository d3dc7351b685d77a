"""Races between an engine that never idles and the copies beside it: 150 rounds of each scenario, all to be clean.

Without a GPU, a few rounds on a simulated one. `python -m kvtier_kernels_bench.part_races FAULT` plants a race, which
has to be found.
"""

import argparse
import sys
from collections.abc import Iterator

from kvtier.bench.report import Case
from kvtier_kernels_bench.races.chip import Chip, Gpu, SimulatedChip
from kvtier_kernels_bench.races.faults import Fault
from kvtier_kernels_bench.races.rig import FULL, TINY
from kvtier_kernels_bench.races.suite import NAMES, Outcome, play
from kvtier_kernels_bench.setting import Setting

_ROUNDS, _TINY_ROUNDS = 150, 5
_BUDGET_S = 45.0


def measure(setting: Setting, fault: Fault = Fault.NONE) -> Iterator[Case]:
    """A row per scenario. Where time runs out, later ones have fewer rounds, and one at least."""
    size = FULL if setting.on_cuda else TINY
    for left, name in zip(range(len(NAMES), 0, -1), NAMES, strict=True):
        chip: Chip = Gpu(setting.device) if setting.on_cuda else SimulatedChip(seed=left)
        until_s = setting.clock() + setting.left_s() / (1 if setting.tiny else left)
        outcome = play(
            name,
            chip,
            size,
            rounds=setting.size(_ROUNDS, _TINY_ROUNDS),
            fault=fault,
            seed=left,
            is_late=lambda until_s=until_s: setting.clock() > until_s,  # type: ignore[misc]
        )
        yield _row(name, outcome, chip.problems)


def _row(name: str, outcome: Outcome, problems: frozenset[str]) -> Case:
    clean = f"{outcome.rounds - outcome.dirty_rounds} of {outcome.rounds} clean"
    failures = [f"{outcome.wrong_blocks} wrong blocks, {clean}"] if outcome.wrong_blocks else []
    failures += sorted(problems)
    return Case(
        name,
        "restore beside a busy engine",
        rounds=outcome.rounds,
        figures={"wrong blocks": outcome.wrong_blocks, "restored blocks": outcome.restored_blocks},
        unit="round",
        detail=f"FAILED: {'; '.join(failures)}" if failures else clean,
    )


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0 when a planted race was found, or none was planted and none found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("fault", nargs="?", default=Fault.NONE.name, choices=[fault.name for fault in Fault])
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    fault, found = Fault[options.fault], False
    for case in measure(Setting.here(_BUDGET_S, tiny=options.tiny), fault):
        print(f"{case.name:34} {case.detail}")
        found |= case.detail.startswith("FAILED")
    return int(found is (fault is Fault.NONE))


if __name__ == "__main__":
    sys.exit(main())
