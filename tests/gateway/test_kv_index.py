"""The index of engines' blocks is what their events say, bounded, and forgets engines at once."""

import random

import pytest

from kvtier_gateway.routing.key_masks import KeyMasks
from kvtier_gateway.routing.kv_index import KvIndex, Runs
from kvtier_gateway.routing.under_way import UnderWay
from kvtier_gateway.routing.values import BlocksCleared, BlocksRemoved, BlocksStored, EngineId, Medium

ENGINES = [EngineId(f"engine-{i}") for i in range(70)]


def leading(keys: list[int], held: set[int]) -> int:
    return next((i for i, key in enumerate(keys) if key not in held), len(keys))


@pytest.mark.parametrize("num_keys", [55, 400])
def test_runs_are_those_of_plain_sets(num_keys: int) -> None:
    source, index = random.Random(3), KvIndex()
    held = {engine: {medium: set[int]() for medium in Medium} for engine in ENGINES}
    for _ in range(6000):
        engine, medium, start = source.choice(ENGINES), source.choice(list(Medium)), source.randrange(num_keys)
        keys = range(start, start + source.randrange(1, num_keys // 3))
        kind = source.choices((BlocksStored, BlocksRemoved, None), (5, 2, 0.2))[0]
        if kind is None:
            index.apply(engine, BlocksCleared())
            held[engine] = {medium: set() for medium in Medium}
        elif kind is BlocksStored:
            index.apply(engine, BlocksStored(keys, medium))
            held[engine][medium].update(keys)
        else:
            index.apply(engine, BlocksRemoved(keys, medium))
            held[engine][medium].difference_update(keys)
    for start, end in [
        (num_keys, num_keys),
        *((start, num_keys) for start in range(0, num_keys - 15, 7)),
        (0, 1),
        (0, 65),
        (0, 66),
    ]:
        keys = list(range(start, end))
        wanted = [
            Runs(
                leading(keys, media[Medium.DEVICE]),
                leading(keys, media[Medium.DEVICE] | media[Medium.HOST]),
            )
            for media in held.values()
        ]
        assert index.runs(keys, ENGINES) == wanted


def test_what_was_found_last_is_found_anew_after_every_change() -> None:
    index, keys, two = KvIndex(max_keys=8), [1, 2, 3, 4], ENGINES[:2]
    assert index.runs(keys, two) == [Runs(0, 0)] * 2
    index.apply(two[0], BlocksStored(keys[:3], Medium.DEVICE))
    assert index.runs(keys, two) == [Runs(3, 3), Runs(0, 0)]
    assert index.runs(keys, two[::-1]) == [Runs(0, 0), Runs(3, 3)]
    assert index.runs(keys[:2], two) == [Runs(2, 2), Runs(0, 0)]
    index.apply(two[0], BlocksRemoved([2], Medium.DEVICE))
    assert index.runs(keys, two) == [Runs(1, 1), Runs(0, 0)]
    index.apply(two[1], BlocksStored(keys, Medium.HOST))
    assert index.runs(keys, two) == [Runs(1, 1), Runs(0, 4)]
    index.forget(two[0])
    assert index.runs(keys, two) == [Runs(0, 0), Runs(0, 4)]
    assert index.runs(keys, two) is index.runs(keys, list(two)), "nothing has changed"


def test_it_is_bounded_and_forgets_what_was_not_touched_for_longest() -> None:
    masks = KeyMasks(1000)
    for key in range(5000):
        masks.add([key], 1)
        masks.touch([7])
    assert len(masks) <= 1000
    assert masks.get(7) == masks.get(4999) == 1
    assert masks.get(100) == 0


def test_unknown_removals_and_touches_leave_nothing_behind() -> None:
    index = KvIndex()
    index.apply(ENGINES[0], BlocksRemoved(range(10), Medium.DEVICE))
    index.touch(range(10))
    assert len(index) == 0


def test_prefixes_under_way_are_found_by_engine() -> None:
    under_way = UnderWay()
    under_way.add(1, ENGINES[0], range(100), 5.0)
    under_way.add(2, ENGINES[0], [*range(40), *range(1000, 1100)], 3.0)
    under_way.add(3, ENGINES[1], [*range(7), 999], 4.0)
    under_way.add(4, ENGINES[2], [50, 51], 4.0)
    assert under_way.runs(range(60)) == {ENGINES[0]: (60, 5.0), ENGINES[1]: (7, 4.0)}
    assert under_way.runs(range(40)) == {ENGINES[0]: (40, 3.0), ENGINES[1]: (7, 4.0)}
    assert under_way.runs([]) == under_way.runs([12345]) == {}
    under_way.forget(ENGINES[0])
    assert under_way.remove(3) == (ENGINES[1], [*range(7), 999])
    assert under_way.runs(range(60)) == {}
