"""Restores beside an engine that never idles, on a simulated device that does everything as late, as early and in
whatever order streams and events allow: no block is wrong, and each race that is planted is found."""

from collections.abc import Callable

import pytest
import torch

from kvtier_bench.gpu.measuring.setting import Setting
from kvtier_bench.gpu.parts import races as part_races
from kvtier_bench.gpu.races.chip import SimulatedChip, Way
from kvtier_bench.gpu.races.faults import Fault
from kvtier_bench.gpu.races.pages import Pages
from kvtier_bench.gpu.races.rig import TINY
from kvtier_bench.gpu.races.suite import COSTS, NAMES, WHOLE, Outcome, play

STAGED = [Way.STAGED, Way.BY_KERNEL, Way.ONE_BY_ONE]


def played(name: str, way: Way, *, seed: int = 1, fault: Fault = Fault.NONE) -> tuple[Outcome, frozenset[str]]:
    chip = SimulatedChip(seed, way)
    return play(name, chip, TINY, rounds=10, fault=fault, seed=seed), chip.problems


@pytest.mark.parametrize("way", list(Way))
@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_wrong(name: str, way: Way) -> None:
    outcome, problems = played(name, way)
    assert (outcome.wrong_blocks, problems) == (0, frozenset())
    assert outcome.rounds == 10
    assert outcome.restored_blocks >= outcome.rounds


@pytest.mark.parametrize(
    ("fault", "ways", "names"),
    [
        (Fault.EARLY_FENCE, Way, ["delay before store", "zeroing against loads", "preemption"]),
        (Fault.NO_FENCE, [Way.DIRECT], NAMES),
        (Fault.NO_FENCE, STAGED, ["delay before store", "delay before load", "loads and saves at a time", WHOLE]),
        (
            Fault.LOADS_UNFENCED,
            Way,
            [
                "delay before load",
                "load beside queued steps",
                "zeroing against loads",
                "loans whose places change hands",
            ],
        ),
        (Fault.NOT_AWAITED, Way, ["delay before store", "delay before load", WHOLE]),
        (Fault.NO_FLUSH, Way, ["blocks reused while copies fly", "several KV groups", WHOLE]),
        (Fault.SHARED_STAGING, STAGED, ["loads and saves at a time"]),
        (Fault.STALE_STREAM, Way, ["several engine streams"]),
        (Fault.LAYERS_NOT_AWAITED, [Way.DIRECT], ["layer by layer"]),
        (Fault.FENCE_BEFORE_LAYERS, [Way.DIRECT], ["layer by layer"]),
        (Fault.OLD_GENERATION, Way, ["loans whose places change hands"]),
    ],
    ids=lambda value: value.name if isinstance(value, Fault) else "",
)
def test_a_planted_race_is_found(fault: Fault, ways: list[Way], names: list[str]) -> None:
    missed = [(way, name) for way in ways for name in names if not played(name, way, fault=fault)[0].wrong_blocks]
    assert not missed, f"{fault.value}, but all was well"


def test_a_seed_takes_the_same_course() -> None:
    """So that a race that was found is found again."""
    name, fault = "loads and saves at a time", Fault.SHARED_STAGING
    first, second = (played(name, Way.STAGED, seed=5, fault=fault) for _ in range(2))
    assert first == second
    assert first != played(name, Way.STAGED, seed=6, fault=fault)


def test_what_blocks_hold_tells_them_apart() -> None:
    """By content, part and place, in as many parts as large models have; host memory holds the same."""
    pages = Pages(torch.device("cpu"), num_blocks=4, part_bytes=32, parts=[80], rounds=1)
    pages.write(pages.places([2, 0]), torch.tensor([7, 8]))
    words = torch.stack([part.view(torch.int64) for part in pages.groups[0]])[:, [2, 0]]
    assert words.unique().numel() == words.numel()
    held = torch.cat([part[2] for part in pages.groups[0]])
    assert held.numpy().tobytes() == pages.payload(7).tobytes()
    pages.check(pages.places([2, 0, 1]), torch.tensor([7, 8, 9]), 0)
    assert pages.wrong.tolist() == [1]


def test_scenarios_share_the_time_by_what_they_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is played until it is late, to the end of the part's time."""
    now, took = 0.0, list[tuple[str, float]]()

    def play(name: str, *_: object, rounds: int, is_late: Callable[[], bool] = lambda: True, **__: object) -> Outcome:
        nonlocal now
        begin = now
        while not is_late():
            now += 0.01
        took.append((name, now - begin))
        return Outcome(rounds, 0, 0, 0, now - begin)

    setting = Setting(torch.device("cpu"), False, torch.float32, 300.0, clock=lambda: now)
    monkeypatch.setattr(part_races, "play", play)
    assert all(case.name in NAMES for case in part_races.measure(setting))
    played = took[len(Way) :]
    setup_s = part_races._SETUP_S
    a_unit_s = (300.0 / len(Way) - len(NAMES) * setup_s) / sum(COSTS.values())
    shares_s = [setup_s + COSTS[name] * a_unit_s for name, _ in played]
    assert [seconds for _, seconds in played] == pytest.approx(shares_s, abs=0.05)


def test_as_a_part_of_a_run() -> None:
    """A row each, which says so when something is wrong."""
    setting = Setting(torch.device("cpu"), True, torch.float32, 1.0, clock=lambda: 0.0)
    cases = {(case.name, case.op): case for case in part_races.measure(setting, Fault.STALE_STREAM)}
    assert len(cases) == len(NAMES) * len(Way)
    assert cases["preemption", "restore, simulated, by kernel"].detail == "3 of 3 clean"
    streams = cases["several engine streams", "restore, simulated, direct"]
    assert streams.detail.startswith(f"FAILED: {streams.figures['wrong blocks']} wrong blocks, ")
    assert (streams.rounds, streams.unit) == (3, "round")
