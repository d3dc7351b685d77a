"""Pins of a host tier: blocks that stay in memory for as long as somebody likes, and what becomes of the rest."""

from functools import partial

from kvtier.identity.keys import TenantId, tenant_id
from kvtier.testing.contract import make_key, make_payload, read_blocks, summed
from kvtier.tiers.base import Item, Status, WriteStatus
from kvtier.tiers.host.pins import SlabPin
from kvtier.tiers.host.slots import WriteSlot
from kvtier.tiers.host.tier import HostTier

KIB = 1024
RED, BLUE = tenant_id("red"), tenant_id("blue")


def block(label: object, *, tenant: TenantId = RED) -> Item[bytes]:
    return summed(make_key(label, tenant=tenant), make_payload(label, 4 * KIB))


def pin(tier: HostTier, *labels: object) -> list[SlabPin]:
    pins = tier.pin([block(label)[0] for label in labels])
    assert all(pins)
    return [one for one in pins if one is not None]


def test_a_slab_with_a_pin_stays_and_its_other_slots_are_used() -> None:
    tier = HostTier(64 * KIB, slab_bytes=16 * KIB)
    tier.write([block(i) for i in range(16)])
    (one,) = pin(tier, 0)
    assert (one.key, one.nbytes, one.slab_bytes) == (block(0)[0], 4 * KIB, 4 * KIB)
    tier.check()
    for i in range(100, 200):
        assert tier.write([block(i)]) == [WriteStatus.STORED]
    assert tier.lookup([block(i)[0] for i in range(2)]) == [Status.HIT, Status.MISS]
    for i in range(200, 300):
        assert tier.write([block(i, tenant=BLUE)]) == [WriteStatus.STORED]
    assert read_blocks(tier, [one.key], 4 * KIB) == [block(0)[1]]
    tier.unpin([one])
    tier.unpin([one])
    for i in range(300, 400):
        tier.write([block(i)])
    assert tier.lookup([one.key]) == [Status.MISS]
    tier.check()


def test_pins_are_of_blocks_that_can_be_read() -> None:
    tier = HostTier(64 * KIB)
    tier.write([block("a")])
    slot = tier.prepare(block("b")[0], 4 * KIB)
    assert isinstance(slot, WriteSlot)
    one, being_written, absent = tier.pin([block(label)[0] for label in "abc"])
    assert (being_written, absent) == (None, None)
    assert one is not None
    assert tier.are_findable([one]) == [True]
    again = pin(tier, "a")
    assert one.is_of_same_block(again[0])
    tier.discard([one.key])
    tier.write([block("a")])
    assert tier.are_findable([one, *again]) == [False, False]
    assert not one.is_of_same_block(*pin(tier, "a"))
    tier.abort(slot)
    tier.close()
    tier.unpin([one, *again])


def test_a_writer_whose_blocks_are_all_pinned_gets_the_room_of_others_of_its_class() -> None:
    """Not FULL for as long as the pins last."""
    tier = HostTier(1024 * KIB, slab_bytes=32 * KIB)
    write_as = partial(tier.prepare, nbytes=4 * KIB)

    def write(writer: int, label: object) -> WriteStatus:
        slot = write_as(block(label)[0], writer=writer)
        if isinstance(slot, WriteStatus):
            return slot
        tier.commit(slot, 0)
        return WriteStatus.STORED

    own = [("own", i) for i in range(8)]
    assert {write(1, label) for label in own} == {WriteStatus.STORED}
    for i in range(8, 248):
        write(2, i)
    pins = pin(tier, *own)
    read_blocks(tier, [block(i)[0] for i in range(8, 300)], 4 * KIB)  # what the other wrote was used later
    assert [write(1, ("more", i)) for i in range(40)] == [WriteStatus.STORED] * 40
    assert tier.lookup([p.key for p in pins]) == [Status.HIT] * 8
    tier.check()
    tier.unpin(pins)
    tier.check()
