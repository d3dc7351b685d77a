"""The conditions of admission, one by one and together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import ConfigError
from kvtier.policies.admission import (
    Admission,
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
    """For a tier of a hundred blocks."""
    return parse_admission(text, 1000)


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
    assert [condition.admits(offer()._replace(tenant_bytes=held)) for held in (0, 15, 16)] == [True, True, False]


def test_a_days_budget_comes_in_little_by_little() -> None:
    condition = BytesPerDay(240)  # ten an hour
    assert condition.admits(offer(nbytes=10))
    condition.entered(offer(nbytes=10))
    assert not condition.admits(offer(nbytes=1))
    assert not condition.admits(offer(nbytes=10, time_s=1800))
    assert condition.admits(offer(nbytes=5, time_s=1800))
    assert condition.admits(offer(nbytes=10, time_s=100_000))
    assert not condition.admits(offer(nbytes=11, time_s=100_000))


def offered(condition: Admission | BytesPerDay, each: Offer) -> bool:
    """Whether the block was let in."""
    is_in = condition.admits(each) if isinstance(condition, BytesPerDay) else condition.refusal(each) is None
    if is_in:
        condition.entered(each)
    return is_in


def test_a_budget_is_kept_and_nobody_takes_another_ones_part_of_it() -> None:
    """Red would write all that there is, for a day; blue comes in the middle of it and wants a block each minute."""
    condition = BytesPerDay(86_400)
    written = {"red": 0, "blue": 0}
    for second in range(0, 86_400, 10):
        for _ in range(3):
            written["red"] += 10 * offered(condition, offer(tenant="red", time_s=float(second)))
        if second >= 43_200 and not second % 60:
            written["blue"] += 10 * offered(condition, offer(tenant="blue", time_s=float(second)))
    assert written["blue"] > 0.99 * 10 * 720, "all that it wanted"
    assert 86_400 * 0.9 < sum(written.values()) <= 86_400 + 3_600


def test_tenants_who_want_all_of_a_budget_have_equal_parts() -> None:
    condition = BytesPerDay(86_400)
    written = dict.fromkeys("abc", 0)
    for second in range(3_600 + 6_000):
        for tenant in written:
            is_in = offered(condition, offer(tenant=tenant, time_s=float(second)))
            written[tenant] += 10 * (is_in and second >= 3_600)
    assert max(written.values()) < 1.1 * min(written.values())


def test_what_idle_tenants_leave_of_a_budget_the_others_may_use() -> None:
    condition = BytesPerDay(86_400)
    for second in range(0, 7_200, 600):
        for tenant in range(20):
            offered(condition, offer(tenant=f"idle {tenant}", nbytes=1, time_s=float(second)))
        assert offered(condition, offer(tenant="busy", nbytes=500, time_s=float(second)))


def test_all_conditions_have_to_hold_and_all_see_every_offer() -> None:
    condition = Admission([("min-run", MinRun(2)), ("second-use", SecondUse(10))])
    assert condition.refusal(offer(run_blocks=1)) == "min-run"
    assert condition.refusal(offer(run_blocks=2)) is None
    assert condition.refusal(offer("b", run_blocks=2)) == "second-use"


@pytest.mark.parametrize("text", ["second-use:3", "frequency:2"])
def test_no_tenant_ages_out_what_another_ones_offers_have_shown(text: str) -> None:
    condition = parsed(text)
    assert not offered(condition, offer("a", tenant="quiet"))
    for key in range(5_000):
        offered(condition, offer(key, tenant="loud"))
    assert offered(condition, offer("a", tenant="quiet"))


def test_what_is_remembered_of_a_tenant_is_what_the_tier_would_hold_of_its_blocks() -> None:
    condition = parsed("second-use")  # a hundred of ten bytes; two generations of as many
    for key in range(200):
        offered(condition, offer(key))
    assert not offered(condition, offer("b"))
    assert not offered(condition, offer(99))
    assert offered(condition, offer(199))


@pytest.mark.parametrize("name", CONDITIONS)
def test_each_example_can_be_read(name: str) -> None:
    example = CONDITIONS[name].split("`")[1]
    refusal = parsed(example).refusal(offer(run_blocks=4))
    assert refusal == (name if name in ("second-use", "frequency") else None)


def test_conditions_are_separated_by_commas() -> None:
    condition = parsed("frequency:2, min-run:4")
    refusals = [condition.refusal(offer(run_blocks=length)) for length in (4, 4, 1)]
    assert refusals == ["frequency", None, "min-run"]


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


def test_a_share_of_a_tier_that_does_not_say_what_it_holds_is_refused() -> None:
    with pytest.raises(ConfigError, match="this tier does not say how much it holds"):
        parse_admission("tenant-share:0.5", None)
    assert parse_admission("second-use", None).refusal(offer()) == "second-use"
