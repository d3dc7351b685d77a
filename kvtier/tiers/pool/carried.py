"""What transports ask of a block on its way to or from a pool, whether it travels as it is or sealed."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from itertools import chain

import numpy as np

from kvtier.errors import CorruptBlockError
from kvtier.identity.keys import StoreKey
from kvtier.memory.pieces import Payload, Target
from kvtier.memory.pieces import land as land_pieces
from kvtier.memory.pieces import landing as landing_of
from kvtier.protocol.arriving import ArrivingBlock
from kvtier.tiers.base import Item
from kvtier.tiers.pool.carriage import HELPED_FROM_BYTES, Carriage
from kvtier.tiers.pool.sealed_blocks import Buffer, SealedArrival, SealedPayload, SealedTarget

Outgoing = Payload | SealedPayload
"""What a transport writes."""
Incoming = Target | SealedTarget
"""What a transport reads into."""


def sealed_items(items: Sequence[Item[Payload]], by: Carriage | None) -> Sequence[Item[Outgoing]]:
    """Blocks to be written, sealed where there are keys. `carried` makes the checksums of sealed ones."""
    return items if by is None else [(item[0], SealedPayload(item, by), item[2]) for item in items]


def sealed_targets(keys: Sequence[StoreKey], into: Sequence[Target], by: Carriage | None) -> Sequence[Incoming]:
    """Targets of a read; where there are keys, of sealed blocks only."""
    return into if by is None else [SealedTarget(key, target, by) for key, target in zip(keys, into, strict=True)]


def helper_of(block: Outgoing | Incoming) -> Executor | None:
    """The thread that helps with blocks like this one; None where they are not sealed, or too small for it to pay."""
    if isinstance(block, SealedPayload | SealedTarget) and len(block) >= HELPED_FROM_BYTES:
        return block.carriage.helper
    return None


def can_stream(items: Sequence[Item[Outgoing]]) -> bool:
    """Whether it pays to make blocks while they are sent: all are sealed, and large."""
    return all(isinstance(block, SealedPayload) and len(block) >= HELPED_FROM_BYTES for _, block, _ in items)


def streamed(items: Sequence[Item[Outgoing]]) -> Iterator[Buffer]:
    """Blocks for which `can_stream` holds, as they travel, each with its checksum behind it, made while they are
    sent."""
    return chain.from_iterable(block.streamed() for _, block, _ in items if isinstance(block, SealedPayload))


def carried(item: Item[Outgoing]) -> tuple[Payload, int]:
    """What travels of a block, and its checksum. Seals it, where it is to be."""
    _, payload, checksum = item
    return payload.sealed() if isinstance(payload, SealedPayload) else (payload, checksum)


def arriving(
    tag: int, header: bytes, key: StoreKey, target: Incoming, into: memoryview
) -> ArrivingBlock | SealedArrival:
    """A block that is on its way through a socket.

    :param into: memory of `landing`, which has the block when it is complete and has no fault.
    """
    if isinstance(target, SealedTarget):
        return SealedArrival(tag, header, target, into)
    return ArrivingBlock.asked_for(tag, header, key, into)


def landing(target: Incoming) -> memoryview:
    """The memory that a block which comes piece by piece goes to: the target itself, or memory for `land`."""
    return landing_of(target.target if isinstance(target, SealedTarget) else target)


def land(landed: memoryview, target: Incoming) -> None:
    """What has come in the memory of `landing` goes where it belongs."""
    land_pieces(landed, target.target if isinstance(target, SealedTarget) else target)


def landing_whole(target: Incoming) -> memoryview:
    """Memory for a block as it travels, for `land_whole`."""
    return np.empty(len(target), np.uint8).data if isinstance(target, SealedTarget) else landing_of(target)


def land_whole(landed: memoryview, target: Incoming) -> CorruptBlockError | None:
    """What has come in the memory of `landing_whole`, and is what the pool has, goes where it belongs; or what is wrong
    with it."""
    if isinstance(target, SealedTarget):
        return target.opening(landed, is_shared=False)()
    land_pieces(landed, target)
    return None
