"""KV events of engines reach the index in order; what was missed is asked for once."""

import msgpack
import pytest

from kvtier_engine.events.event_form import CLEARED, DEVICE_PLACE, DISK_PLACE, HOST_PLACE, pack_batch, removed, stored
from kvtier_gateway.routing.event_batches import MAX_AHEAD, BatchOrder, MalformedEventsError, Replay, decode_batch
from kvtier_gateway.routing.values import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent, Medium


def batch(number: int) -> list[KvEvent]:
    return [BlocksStored([number], Medium.DEVICE)]


def test_what_our_engine_publishes_is_understood() -> None:
    long_hash = bytes(range(32))
    events = [
        CLEARED,
        stored([1, 2**64 - 1], None, [0] * 32, 16, DEVICE_PLACE),
        removed([long_hash], HOST_PLACE),
        stored([3], 2, [0] * 16, 16, DISK_PLACE),
    ]
    assert decode_batch(pack_batch(events, 0.0)) == [
        BlocksCleared(),
        BlocksStored([1, 2**64 - 1], Medium.DEVICE),
        BlocksRemoved([int.from_bytes(long_hash[-8:], "big")], Medium.HOST),
    ]


@pytest.mark.parametrize(
    "packed", [b"", b"\xc1", msgpack.packb(7), msgpack.packb([0, [{"no": "type"}]]), msgpack.packb([0])]
)
def test_garbage_has_an_error_of_its_own(packed: bytes) -> None:
    with pytest.raises(MalformedEventsError):
        decode_batch(packed)


def test_a_gap_is_asked_for_once_and_closed_by_the_replay() -> None:
    order = BatchOrder()
    assert order.take(0, batch(0)) == (batch(0), None)
    assert order.take(3, batch(3)) == ([], Replay(1))
    assert order.take(4, batch(4)) == ([], None)
    assert order.take(1, batch(1)) == (batch(1), None)
    assert order.take(2, batch(2)) == ([*batch(2), *batch(3), *batch(4)], None)
    assert order.take(2, batch(2)) == ([], None)
    assert order.num_gaps == 1


def test_what_nobody_has_any_more_is_passed_over() -> None:
    order = BatchOrder()
    assert order.take(10, batch(10)) == ([], Replay(0))
    assert order.give_up() == batch(10)
    assert order.take(11, batch(11)) == (batch(11), None)


def test_an_engine_that_starts_anew_counts_from_0() -> None:
    order = BatchOrder()
    for number in range(5):
        order.take(number, batch(number))
    fresh: list[KvEvent] = [BlocksCleared()]
    assert order.take(0, fresh) == (fresh, None)
    assert order.take(1, batch(1)) == (batch(1), None)


def test_what_waits_for_a_replay_is_bounded() -> None:
    order = BatchOrder()
    applied: list[KvEvent] = []
    for number in range(1, 2 * MAX_AHEAD):
        applied += order.take(number, batch(number))[0]
    assert len(applied) >= MAX_AHEAD - 1
