"""Plays scenarios, some rounds of each, and tells how many were clean."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from kvtier_bench.gpu.races.chip import Chip
from kvtier_bench.gpu.races.faults import Fault
from kvtier_bench.gpu.races.pages import Pages
from kvtier_bench.gpu.races.rig import Size, rig
from kvtier_bench.gpu.races.scenarios import SCENARIOS
from kvtier_bench.gpu.races.whole import whole

WHOLE = "through the directory"
COSTS: Mapping[str, float] = {**{name: scenario.cost for name, scenario in SCENARIOS.items()}, WHOLE: 4.5}
"""`Scenario.cost` of everything that can be played."""
NAMES = tuple(COSTS)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a scenario's rounds."""

    rounds: int
    dirty_rounds: int
    """The number of rounds in which a block held anything else than it should."""
    wrong_blocks: int
    restored_blocks: int
    seconds: float
    """How long the rounds took by the chip's clock."""


def play(
    name: str,
    chip: Chip,
    size: Size,
    *,
    rounds: int,
    fault: Fault = Fault.NONE,
    seed: int = 0,
    is_late: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Plays at most so many rounds of a scenario, on memory of their own.

    :param name: one of `NAMES`.
    :param is_late: asked after each round; where it says so, no other is begun.
    :raises KvtierError: something does not come to an end.
    """

    def rounds_of(play_round: Callable[[int], None]) -> int:
        for number in range(rounds):
            if number and is_late():
                return number
            chip.begin_round()
            play_round(number)
        return rounds

    begin = chip.clock()
    with chip.running():
        if name == WHOLE:
            with whole(chip, size, rounds=rounds, fault=fault, seed=seed) as played:
                count = rounds_of(played.play)
            return _outcome(count, played.pages, played.num_restored, chip.clock() - begin)
        scenario = SCENARIOS[name]
        if scenario.in_one_part:
            size = replace(size, parts=(1,), part_bytes=size.block_bytes)
        else:
            size = replace(size, parts=size.parts[: scenario.num_groups])
        with rig(chip, size, rounds=rounds, fault=fault, seed=seed) as rigged:
            count = rounds_of(lambda number: scenario.round(rigged, number))
        return _outcome(count, rigged.pages, rigged.num_restored, chip.clock() - begin)


def _outcome(rounds: int, pages: Pages, restored: int, seconds: float) -> Outcome:
    return Outcome(rounds, int((pages.wrong > 0).sum()), int(pages.wrong.sum()), restored, seconds)
