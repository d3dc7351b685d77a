"""LRU against a list."""

from hypothesis import given
from hypothesis import strategies as st

from kvtier.policies.base import UNKNOWN_USE
from kvtier.policies.lru import LRU


@given(st.lists(st.tuples(st.sampled_from(["use", "evict", "discard"]), st.integers(0, 5))))
def test_the_order_is_that_of_the_last_uses(steps: list[tuple[str, int]]) -> None:
    policy: LRU[int] = LRU()
    model: list[int] = []
    for step, key in steps:
        if step == "use":
            (policy.touch if key in model else policy.insert)(key, UNKNOWN_USE)
            model = [other for other in model if other != key] + [key]
        elif key in model:
            policy.remove(key, evicted=step == "evict")
            model.remove(key)
        assert policy.coldest(3) == model[:3]
        assert len(policy) == len(model)
        assert (key in policy) == (key in model)
