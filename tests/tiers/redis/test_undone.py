"""Discards that a server has not heard of: who loses some when there are too many, and who hears of them first."""

import pytest

from kvtier.testing.blocks import make_key
from kvtier.tiers.redis import undone
from kvtier.tiers.redis.undone import UndoneDiscards
from pool_rig import BLUE, RED, keys

FEW = 4


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(undone, "_MAX_KEYS", 10)


def test_discards_of_one_tenant_undo_none_of_another_one() -> None:
    discards = UndoneDiscards()
    blues, reds = keys(range(FEW), BLUE), keys(range(30), RED)
    assert discards.add(blues) == 0
    assert [discards.add([key]) for key in reds] == [0] * 6 + [1] * 24
    assert discards.among(blues) == list(range(FEW))
    assert discards.among(reds) == list(range(24, 30)), "the oldest of whoever has most"
    assert discards.add(keys(range(100, 103), BLUE)) == 3, "down to equal parts"
    assert (len(discards.among(blues + keys(range(100, 103), BLUE))), len(discards.among(reds))) == (5, 5)


def test_a_server_hears_of_tenants_in_turn() -> None:
    discards = UndoneDiscards()
    reds = keys(range(5), RED)
    discards.add(reds)
    discards.add([make_key("one", tenant=BLUE)])
    assert discards.oldest(3) == [reds[0], make_key("one", tenant=BLUE), reds[1]]
    assert len(discards.oldest(100)) == 6
    discards.done([*reds, make_key("never", tenant=BLUE)])
    assert discards
    assert discards.oldest(100) == [make_key("one", tenant=BLUE)]
    discards.done([make_key("one", tenant=BLUE)])
    assert not discards
    assert discards.oldest(100) == []


def test_a_key_counts_once() -> None:
    discards = UndoneDiscards()
    for _ in range(5):
        assert discards.add(keys(range(10))) == 0
    assert discards.among(keys(range(10))) == list(range(10))
