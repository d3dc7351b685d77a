"""The order of use: that it is the order of the calls."""

import random

from kvtier.policies.use_order import UseOrder


def test_it_is_the_order_of_the_calls() -> None:
    choice, order, expected = random.Random(6), UseOrder(), list[int]()
    for _ in range(20):
        order.add_slot()
    for _ in range(2000):
        slot = choice.randint(1, 20)
        if slot not in expected:
            order.append(slot)
        else:
            expected.remove(slot)
            if choice.random() < 0.3:
                order.remove(slot)
                assert order.oldest(20) == expected
                continue
            order.renew(slot)
        expected.append(slot)
        assert order.oldest(20) == expected
        assert order.oldest(3) == expected[:3]
