"""The time of day that ends tokens and secrets."""

from clock_rig import StillClock
from kvtier.clock import NeverBehind


def test_a_clock_that_is_set_back_brings_nothing_back() -> None:
    day, monotonic = StillClock(), StillClock()
    clock = NeverBehind(day, monotonic)
    for of in (day, monotonic):
        of.now_s += 60.0
    assert clock() == 1060.0
    day.now_s -= 86_400.0
    assert clock() == 1060.0, "as long has passed since the start"
    monotonic.now_s += 5.0
    assert clock() == 1065.0
    day.now_s += 2 * 86_400.0
    assert clock() == day.now_s, "a clock that is set on is believed, also after a sleep of the machine"
    day.now_s -= 86_400.0
    assert clock() == 1065.0, "and is no reason to end what has time left"
