"""What a host tier tells the world of its content: in the order of the changes, with no lock held."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvtier.errors import InvalidInputError
from kvtier.events import Event, EventKind
from kvtier.identity.keys import StoreKey
from kvtier.testing.blocks import summed
from kvtier.testing.contract import make_key, make_payload
from kvtier.tiers.base import Item, Status, WriteStatus
from kvtier.tiers.common.event_queue import EventQueue
from kvtier.tiers.host.slots import WriteSlot
from kvtier.tiers.host.tier import HostTier

KIB = 1024


def block(label: object) -> Item[bytes]:
    return summed(make_key(label), make_payload(label, 4 * KIB))


def test_events_keep_their_order_while_one_is_being_delivered() -> None:
    delivered: list[EventKind] = []

    def deliver(event: Event) -> None:
        if event.kind is EventKind.STORED:
            outbox.post(EventKind.CLEARED)
            other = threading.Thread(target=outbox.flush)
            other.start()
            other.join(10)
        delivered.append(event.kind)

    outbox = EventQueue("host", deliver)
    outbox.post(EventKind.STORED, [make_key("a")])
    outbox.flush()
    assert delivered == [EventKind.STORED, EventKind.CLEARED]


def test_events_follow_the_changes() -> None:
    events: list[Event] = []
    tier = HostTier(8 * KIB, on_event=events.append)
    a, b, c = (make_key(label) for label in "abc")
    tier.write([block("a"), block("b")])
    tier.write([block("c")])
    tier.discard([a, make_key("absent")])
    tier.close()
    assert events == [
        Event(EventKind.STORED, "host", (a, b)),
        Event(EventKind.REMOVED, "host", (b,)),
        Event(EventKind.STORED, "host", (c,)),
        Event(EventKind.REMOVED, "host", (a,)),
        Event(EventKind.CLEARED, "host"),
    ]


def test_a_batch_with_a_slot_that_was_committed_before_stores_all_others_with_an_event() -> None:
    events: list[Event] = []
    tier = HostTier(64 * KIB, on_event=events.append)
    slots = [tier.prepare(make_key(label), 4 * KIB) for label in "abc"]
    checksums = {slot: 0 for slot in slots if isinstance(slot, WriteSlot)}
    before = next(slot for slot in checksums if slot.key == make_key("b"))
    tier.commit(before, 0)
    with pytest.raises(InvalidInputError, match="1 of 3 write slots"):
        tier.commit_all(checksums)
    a, b, c = (make_key(label) for label in "abc")
    assert tier.lookup([a, b, c]) == [Status.HIT] * 3
    assert events == [Event(EventKind.STORED, "host", (b,)), Event(EventKind.STORED, "host", (a, c))]
    tier.check()


def test_events_replay_to_the_content_whatever_the_threads_do() -> None:
    there: set[StoreKey] = set()

    def replay(event: Event) -> None:
        for key in event.keys:
            assert (key in there) == (event.kind is EventKind.REMOVED)
            there.symmetric_difference_update([key])
        if event.kind is EventKind.REMOVED:
            tier.lookup(event.keys)  # the sink may call the tier: no lock is held

    tier = HostTier(64 * KIB, on_event=replay)

    def churn(worker: int) -> None:
        for i in range(200):
            tier.write([block((i + 7 * worker) % 30)])
            tier.discard([block((i * worker) % 30)[0]])

    with ThreadPoolExecutor(4) as executor:
        list(executor.map(churn, range(4)))
    keys = [block(i)[0] for i in range(30)]
    assert there == {key for key, status in zip(keys, tier.lookup(keys), strict=True) if status is Status.HIT}


def test_a_failing_event_sink_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    def fail(event: Event) -> None:
        raise RuntimeError("sink is broken")

    tier = HostTier(64 * KIB, on_event=fail)
    assert tier.write([block("a")]) == [WriteStatus.STORED]
    assert tier.write([block("b")]) == [WriteStatus.STORED]
    assert [record.exc_info is not None for record in caplog.records] == [True, True]
