"""The uses of a block, counted until a policy writes it."""

import pytest

from kvtier.errors import InvalidInputError
from kvtier.tiers.common.write_policy import UseCounts


def test_a_key_is_enough_from_its_nth_use_on_and_says_so_once() -> None:
    counts: UseCounts[bytes] = UseCounts(3, 10)
    assert [counts.note(b"a") for _ in range(5)] == [False, False, True, False, False]
    assert counts.is_enough(b"a")
    assert not counts.is_enough(b"b")


def test_one_use_is_enough_at_once() -> None:
    counts: UseCounts[bytes] = UseCounts(1, 10)
    assert counts.note(b"a")


def test_the_key_used_longest_ago_is_forgotten() -> None:
    counts: UseCounts[bytes] = UseCounts(2, 2)
    for key in (b"a", b"b", b"a", b"c"):
        counts.note(key)
    assert counts.is_enough(b"a")
    assert not counts.note(b"b"), "forgotten: this is its first use again"


@pytest.mark.parametrize(("enough", "max_keys"), [(0, 1), (1, 0)])
def test_counts_of_no_use_or_of_no_key_are_refused(enough: int, max_keys: int) -> None:
    with pytest.raises(InvalidInputError):
        UseCounts(enough, max_keys)
