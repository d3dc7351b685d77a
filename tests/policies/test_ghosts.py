"""Ghosts: that they remember what was evicted last, as far as there are places, and forget the others by age."""

import random

from kvtier.policies.ghosts import NO_GHOST, Ghosts, mixed_hash

KIND = 288


def test_a_block_is_remembered_once() -> None:
    ghosts = Ghosts(1000, 0)
    assert ghosts.swap(mixed_hash(7), KIND, 5) == NO_GHOST
    assert ghosts.take(mixed_hash(8)) == NO_GHOST
    assert ghosts.take(mixed_hash(7)) == KIND
    assert ghosts.tick == 5
    assert ghosts.take(mixed_hash(7)) == NO_GHOST


def test_the_older_one_of_two_is_forgotten() -> None:
    ghosts = Ghosts(2, 0)
    for key, tick in ((1, 20), (2, 10)):
        assert ghosts.swap(mixed_hash(key), key, tick) == NO_GHOST
    assert ghosts.swap(mixed_hash(3), 3, 30) == 2
    assert ghosts.tick == 10
    assert ghosts.swap(mixed_hash(4), 4, 40) == 1
    assert ghosts.tick == 20
    assert [ghosts.take(mixed_hash(key)) for key in (1, 2, 3, 4)] == [NO_GHOST, NO_GHOST, 3, 4]


def test_most_of_what_fits_is_remembered() -> None:
    choice, ghosts = random.Random(7), Ghosts(12000, 0)
    keys = [choice.randbytes(32) for _ in range(3000)]
    for tick, key in enumerate(keys):
        ghosts.swap(mixed_hash(key), tick % KIND, tick)
    kinds = [ghosts.take(mixed_hash(key)) for key in keys]
    assert all(kind in (NO_GHOST, tick % KIND) for tick, kind in enumerate(kinds))
    assert kinds.count(NO_GHOST) < 200


def test_ticks_may_go_beyond_32_bits() -> None:
    now = (1 << 32) * 3 + 17
    ghosts = Ghosts(100, now)
    ghosts.swap(mixed_hash(1), KIND, now + 1)
    assert ghosts.take(mixed_hash(1)) == KIND
    assert ghosts.tick == now + 1
    assert ghosts.lasts_until(now + 100)
    assert not ghosts.lasts_until(now + (1 << 32))
    ghosts.swap(mixed_hash(2), KIND, now + (1 << 32))
