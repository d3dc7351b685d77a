"""Leased blocks, copied to a tier: never one whose bytes are not what its writer committed."""

from collections.abc import Mapping

from kvtier.codec.stored_form import checksum
from kvtier.identity.keys import StoreKey
from kvtier.tiers.base import Status, Tier, WriteStatus
from kvtier.tiers.host.pins import ReadPin


def copy_down(tier: Tier, leases: Mapping[StoreKey, ReadPin]) -> dict[StoreKey, WriteStatus | None]:
    """The tier's answer per block; None for one that does not match its checksum, which the tier was not given.

    Memory takes the checksum of a client that writes through shared memory on trust, and the tier computes its own
    from the bytes it gets: unchecked, a block that a broken client left half written would become a valid one. What
    this leaves open is a client that writes to a block after its commit, in the moment between this look and the
    tier's. It may hurt readers of its own tenant, as anything may that it writes under their keys.

    What the tier has already is asked first, so that it is neither hashed nor sent again.
    """
    there = tier.lookup(list(leases))
    answers: dict[StoreKey, WriteStatus | None] = dict.fromkeys(leases, WriteStatus.EXISTS)
    sound: list[StoreKey] = []
    for (key, lease), status in zip(leases.items(), there, strict=True):
        if status is not Status.MISS:
            continue
        if checksum(key, lease.view) == lease.checksum:
            sound.append(key)
        else:
            answers[key] = None
    if sound:
        written = tier.write([(key, leases[key].view) for key in sound])
        answers.update(zip(sound, written, strict=True))
    return answers
