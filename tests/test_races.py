"""Restores beside an engine that never idles, on a simulated device that does everything as late, as early and in
whatever order streams and events allow: no block is wrong, and each race that is planted is found."""

import pytest

from kvtier_kernels_bench.races.chip import SimulatedChip
from kvtier_kernels_bench.races.faults import Fault
from kvtier_kernels_bench.races.rig import TINY
from kvtier_kernels_bench.races.suite import NAMES, WHOLE, Outcome, play


def played(name: str, *, seed: int, rounds: int = 12, fault: Fault = Fault.NONE) -> tuple[Outcome, frozenset[str]]:
    chip = SimulatedChip(seed)
    return play(name, chip, TINY, rounds=rounds, fault=fault, seed=seed), chip.problems


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_wrong(name: str, seed: int) -> None:
    outcome, problems = played(name, seed=seed)
    assert (outcome.wrong_blocks, problems) == (0, frozenset())
    assert outcome.rounds == 12
    assert outcome.restored_blocks >= outcome.rounds


@pytest.mark.parametrize(
    ("fault", "names"),
    [
        (Fault.EARLY_FENCE, ["delay before store", "delay before load", "preemption"]),
        (Fault.NO_FENCE, [*NAMES]),
        (
            Fault.LOADS_UNFENCED,
            ["delay before load", "zeroing against loads", "loans whose places change hands", WHOLE],
        ),
        (Fault.NOT_AWAITED, [*NAMES]),
        (Fault.NO_FLUSH, ["blocks reused while copies fly", "CUDA graphs", "several KV groups", WHOLE]),
        (Fault.SHARED_STAGING, ["loads and saves at a time"]),
        (Fault.STALE_STREAM, ["several engine streams"]),
        (Fault.OLD_GENERATION, ["loans whose places change hands"]),
    ],
    ids=lambda value: value.name if isinstance(value, Fault) else "",
)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_planted_race_is_found(fault: Fault, names: list[str], seed: int) -> None:
    missed = [name for name in names if not played(name, seed=seed, fault=fault)[0].wrong_blocks]
    assert not missed, f"{fault.value}, but all was well"


def test_a_seed_takes_the_same_course() -> None:
    """So that a race that was found is found again."""
    name, fault = "loads and saves at a time", Fault.SHARED_STAGING
    assert played(name, seed=5, fault=fault) == played(name, seed=5, fault=fault)
