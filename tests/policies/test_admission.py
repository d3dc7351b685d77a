"""The conditions of admission, one by one and together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import ConfigError
from kvtier.policies.admission import (
    Admission,
    AllOf,
    BytesPerDay,
    Frequency,
    MinRun,
    Offer,
    SecondUse,
    TenantShare,
)
from kvtier.policies.admission_text import CONDITIONS, parse_admission
from kvtier.policies.sketch import FrequencySketch


def offer(key: object = "a", *, tenant: str = "t", nbytes: int = 10, run_blocks: int = 1, time_s: float = 0.0) -> Offer:
    return Offer(key, tenant, nbytes, run_blocks, time_s)  # type: ignore[arg-type]


def parsed(text: str) -> Admission:
    return parse_admission(text, capacity_blocks=100, capacity_bytes=1000)


@given(keys=st.lists(st.integers(0, 30), max_size=200))
def test_a_sketch_never_counts_too_few(keys: list[int]) -> None:
    sketch = FrequencySketch(64)  # ages after 640
    for place, key in enumerate(keys):
        assert sketch.add(key) >= min(15, keys[: place + 1].count(key))


def test_a_sketch_tells_keys_apart_and_forgets() -> None:
    sketch = FrequencySketch(1000)
    assert sum(sketch.add(key) > 1 for key in range(500)) < 10
    for _ in range(20):
        sketch.add("famous")
    assert sketch.add("famous") == 15
    for key in range(10 * 1024):
        sketch.add(key % 500)
    assert sketch.add("famous") < 15


def test_second_use_remembers_so_many() -> None:
    condition = SecondUse(3)
    assert [condition.admits(offer(key)) for key in "aabca"] == [False, True, False, False, True]
    for key in range(6):
        condition.admits(offer(key))
    assert not condition.admits(offer("a"))


def test_frequency_admits_the_nth_offer() -> None:
    condition = Frequency(3, 100)
    assert [condition.admits(offer()) for _ in range(4)] == [False, False, True, True]


def test_a_run_is_long_enough_or_not() -> None:
    assert [MinRun(4).admits(offer(run_blocks=length)) for length in (1, 3, 4, 9)] == [False, False, True, True]


def test_a_tenant_has_its_share_and_no_more() -> None:
    condition = TenantShare(25)
    for key in "ab":
        assert condition.admits(offer(key))
        condition.entered(offer(key))
    assert not condition.admits(offer("c"))
    assert condition.admits(offer("c", tenant="other"))
    condition.left("a")
    assert condition.admits(offer("c"))


def test_a_days_budget_comes_in_little_by_little() -> None:
    condition = BytesPerDay(240)  # ten an hour
    assert condition.admits(offer(nbytes=10))
    condition.entered(offer(nbytes=10))
    assert not condition.admits(offer(nbytes=1))
    assert not condition.admits(offer(nbytes=10, time_s=1800))
    assert condition.admits(offer(nbytes=5, time_s=1800))
    assert condition.admits(offer(nbytes=10, time_s=100_000))
    assert not condition.admits(offer(nbytes=11, time_s=100_000))


def test_all_conditions_have_to_hold_and_all_see_every_offer() -> None:
    condition = AllOf([MinRun(2), SecondUse(10)])
    assert not condition.admits(offer(run_blocks=1))
    assert condition.admits(offer(run_blocks=2))


def test_they_are_told_together_what_entered_and_left() -> None:
    condition = AllOf([TenantShare(10), TenantShare(20)])
    condition.entered(offer())
    assert not condition.admits(offer("b"))
    condition.left("a")
    assert condition.admits(offer("b"))


@pytest.mark.parametrize("name", CONDITIONS)
def test_each_example_can_be_read(name: str) -> None:
    example = CONDITIONS[name].split("`")[1]
    assert parsed(example).admits(offer(run_blocks=4)) == (name not in ("second-use", "frequency"))


def test_conditions_are_separated_by_commas() -> None:
    condition = parsed("frequency:2, min-run:4")
    assert [condition.admits(offer(run_blocks=length)) for length in (4, 4, 1)] == [False, True, False]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lru", "there is no admission 'lru': `second-use`"),
        ("", "there is no admission ''"),
        ("second-use,", "there is no admission ''"),
        ("frequency", "'frequency': '' is no whole number from 1 to 15; `frequency:3`"),
        ("frequency:16", "'16' is no whole number from 1 to 15"),
        ("min-run:many", "'many' is no whole number"),
        ("second-use:0", "'0' is no whole number"),
        ("tenant-share:2", "'2' is no share above 0 and up to 1"),
        ("tenant-share:nan", "'nan' is no share"),
        ("tenant-share:half", "could not convert string to float"),
        ("bytes-per-day:0", "0 is not above 0"),
        ("bytes-per-day:lots", "'lots' is no number of bytes"),
    ],
)
def test_errors_name_the_remedy(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parsed(text)
