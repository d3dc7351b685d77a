"""Races between an engine that never idles and the copies beside it: 150 rounds of each scenario, all to be clean.

Without a GPU, a few rounds on a simulated one, by each way that blocks can take. `python -m
kvtier_bench.gpu.parts.races FAULT` plants a race, which has to be found.
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from kvtier_bench.gpu.measuring.each import each
from kvtier_bench.gpu.measuring.host_copies import lends, not_lent
from kvtier_bench.gpu.measuring.setting import Setting
from kvtier_bench.gpu.races.chip import Chip, Gpu, SimulatedChip, Way
from kvtier_bench.gpu.races.faults import Fault
from kvtier_bench.gpu.races.rig import LARGE_PAGES, SMALL_PAGES, TINY, Size
from kvtier_bench.gpu.races.suite import COSTS, NAMES, Outcome, play
from kvtier_bench.measuring.report import Case

_ROUNDS, _TINY_ROUNDS = 150, 3
_PLANTED_ROUNDS = 8
_BUDGET_S = 40.0
_SETUP_S = 0.5
"""What it takes about to get memory ready for a scenario, whatever its rounds cost."""
_Place = tuple[str, Size, Callable[[int], Chip]]
"""A name, the size of blocks, and what makes a chip from a seed."""


def measure(setting: Setting, fault: Fault = Fault.NONE) -> Iterator[Case]:
    """Gives a row for each scenario and way of the blocks.

    Scenarios share the time by what their rounds cost, and one whose share is over has fewer rounds. Where lent memory
    cannot be pinned, those that need it copy from it as it is.
    """
    if not lends(setting):
        yield not_lent("restore")
    places = _places(setting)
    cases: dict[str, Callable[[], Iterator[Case]]] = {
        f"first round, {place[0]}": partial(_compiled, place) for place in places
    }
    plays = list(itertools.product(places, NAMES))
    for number, (place, name) in enumerate(plays):
        costs = [COSTS[other] for _, other in plays[number:]]
        cases[f"{name}, {place[0]}"] = partial(_played, setting, place, name, fault, costs)
    yield from each(setting, cases)


def planted(setting: Setting) -> Iterator[Case]:
    """Gives a row for each race that can be planted: the suite has to find it. In tiny size, for one of them."""
    faults = [fault for fault in Fault if fault is not Fault.NONE]
    faults = faults[: setting.size(len(faults), 1)]
    cases: dict[str, Callable[[], Iterator[Case]]] = {}
    for number, fault in enumerate(faults):
        cases[fault.value] = partial(_found, setting, fault, len(faults) - number)
    yield from each(setting, cases)


def _found(setting: Setting, fault: Fault, num_left: int) -> Iterator[Case]:
    """Plays one scenario after the other with the race, until one finds it; in tiny size, the first one in two ways.

    :param num_left: how many races share the time that is left, this one included.
    """
    until_s = setting.clock() + setting.left_s() / num_left
    num_rounds = 0
    plays = itertools.product(NAMES, _places(setting))
    for name, (way, size, chip_of) in itertools.islice(plays, 2) if setting.tiny else itertools.cycle(plays):
        outcome = play(
            name,
            chip_of(num_rounds),
            size,
            rounds=setting.size(_PLANTED_ROUNDS, 2),
            fault=fault,
            is_late=lambda: setting.clock() > until_s,
        )
        num_rounds += outcome.rounds
        if outcome.wrong_blocks:
            found = f"found after {num_rounds} rounds by {name}, {way}"
            yield Case(fault.value, "planted races", rounds=num_rounds, unit="round", detail=found)
            return
        if setting.clock() > until_s:
            break
    missed = f"FAILED: {num_rounds} rounds, all clean"
    yield Case(fault.value, "planted races", rounds=num_rounds, unit="round", detail=missed)


def _compiled(place: _Place) -> Iterator[Case]:
    """Kernels are compiled before anything counts."""
    _, size, chip_of = place
    play(NAMES[0], chip_of(0), size, rounds=1)
    yield from ()


def _played(setting: Setting, place: _Place, name: str, fault: Fault, costs: Sequence[float]) -> Iterator[Case]:
    """
    :param costs: of rounds of all scenarios that have not been played, this one first.
    """
    (way, size, chip_of), seed = place, len(costs)
    left_s = setting.left_s() - len(costs) * _SETUP_S
    share_s = setting.left_s() if setting.tiny else _SETUP_S + left_s * costs[0] / sum(costs)
    chip, until_s = chip_of(seed), setting.clock() + share_s
    outcome = play(
        name,
        chip,
        size,
        rounds=setting.size(_ROUNDS, _TINY_ROUNDS),
        fault=fault,
        seed=seed,
        is_late=lambda: setting.clock() > until_s,
    )
    yield _row(name, f"restore, {way}", outcome, chip.problems)


def _places(setting: Setting) -> list[_Place]:
    if setting.on_cuda:
        sizes = {"large pages": LARGE_PAGES, "small pages": SMALL_PAGES}
        return [(name, size, lambda _seed: Gpu(setting.device)) for name, size in sizes.items()]
    return [
        (f"simulated, {way.name.lower().replace('_', ' ')}", TINY, lambda seed, way=way: SimulatedChip(seed, way))  # type: ignore[misc]
        for way in Way
    ]


def _row(name: str, op: str, outcome: Outcome, problems: frozenset[str]) -> Case:
    clean = f"{outcome.rounds - outcome.dirty_rounds} of {outcome.rounds} clean"
    failures = [f"{outcome.wrong_blocks} wrong blocks, {clean}"] if outcome.wrong_blocks else []
    failures += sorted(problems)
    return Case(
        name,
        op,
        rounds=outcome.rounds,
        figures={
            "wrong blocks": outcome.wrong_blocks,
            "restored blocks": outcome.restored_blocks,
            "ms per round": 1e3 * outcome.seconds / outcome.rounds,
        },
        unit="round",
        detail=f"FAILED: {'; '.join(failures)}" if failures else clean,
    )


def main(arguments: list[str] | None = None) -> int:
    """Prints a line for each row. The exit status is 0 if a race was found where one was planted, and only there."""
    parser = argparse.ArgumentParser()
    parser.add_argument("fault", nargs="?", default=Fault.NONE.name, choices=[fault.name for fault in Fault])
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    fault, found = Fault[options.fault], False
    for case in measure(Setting.here(_BUDGET_S, tiny=options.tiny), fault):
        print(f"{case.op:24} {case.name:34} {case.detail}")
        found |= case.detail.startswith("FAILED")
    return int(found is (fault is Fault.NONE))


if __name__ == "__main__":
    sys.exit(main())
