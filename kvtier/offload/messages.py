"""What passes between the directory and the movers: plain data. `encode` packs it where it crosses a process.

Nothing here refers to memory or to objects of one process. A batch is broadcast to all movers; each
applies it to its own namespace, arena and device, and answers for itself.
"""

from collections.abc import Callable
from dataclasses import astuple, dataclass, field
from typing import Any, Literal

import msgpack

from kvtier.errors import InvalidInputError
from kvtier.system.tracing import NO_CONTEXT

HOST = "host"
"""The tier whose bytes are in the movers' arenas."""

LoadWay = Literal["arena", "direct", "by_layer"]
"""The way of blocks to the device: "arena" is by way of arena slots, which are read from the source first unless that
is `HOST`. "direct" is straight from memory that the source lends. "by_layer" is from host memory, layer after layer.
"""


@dataclass(frozen=True, slots=True)
class LoadBatch:
    """Bring blocks from tier `source` to `device_slots`. Answered by `Loaded`."""

    batch_id: int
    source: str
    keys: list[bytes]
    arena_slots: list[int]
    """A slot for each block; none for a direct load."""
    device_slots: list[int]
    way: LoadWay = "arena"
    """A direct load brings what the source lends, and the rest comes again through the arena. For a load by layer, all
    blocks are in host memory, and `Queued` comes before `Loaded`."""
    trace: str = NO_CONTEXT
    """The context that the load is done within."""
    request_id: str = ""
    """The request whose load it is, which lines of the log name; empty: it is not known."""


@dataclass(frozen=True, slots=True)
class SaveBatch:
    """Copy `device_slots` to `arena_slots`, then write the arena slots to `tiers`."""

    batch_id: int
    tiers: list[str]
    keys: list[bytes]
    arena_slots: list[int]
    device_slots: list[int]
    trace: str = NO_CONTEXT
    """The context that the save is done within, with its writes to tiers."""


@dataclass(frozen=True, slots=True)
class StoreBatch:
    """Write `arena_slots`, which hold the blocks already, to `tier`. Answered by `Stored`."""

    batch_id: int
    tier: str
    keys: list[bytes]
    arena_slots: list[int]


@dataclass(frozen=True, slots=True)
class DiscardBatch:
    """Forget these blocks in `tier`, after the saves and stores that came before. Answered by `Discarded`."""

    batch_id: int
    tier: str
    keys: list[bytes]


@dataclass(frozen=True, slots=True)
class CancelBatch:
    """Do not touch the device slots of this load any more; answered by `Cancelled` or by `Loaded`."""

    batch_id: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """A load is over. `ok[i]` is 1 when the device holds the block, and the arena if the load had slots there."""

    batch_id: int
    ok: bytes
    seconds: float
    """The time that the mover took, beside what it took for batches from the same tier."""


@dataclass(frozen=True, slots=True)
class Queued:
    """Every copy of a load by layer is queued on the device, where the engine waits for each layer.

    Its device slots are the caller's. Its arena slots are read until `Loaded`.
    """

    batch_id: int


@dataclass(frozen=True, slots=True)
class Cancelled:
    """A load will not write to the device any more. Its arena slots are still in use until `Loaded`."""

    batch_id: int


@dataclass(frozen=True, slots=True)
class Copied:
    """A save has read its device slots. `ok[i]` is 1 when the arena holds the block."""

    batch_id: int
    ok: bytes


@dataclass(frozen=True, slots=True)
class Stored:
    """A save or store is over: its tiers have answered or were skipped. The arena slots are no longer read."""

    batch_id: int
    refused: dict[str, list[bytes]] = field(default_factory=dict)
    """The keys of the blocks that a tier did not take, by the tier's name."""


@dataclass(frozen=True, slots=True)
class Discarded:
    """The tier has forgotten the blocks of a `DiscardBatch`; its inventory has said so before."""

    batch_id: int


@dataclass(frozen=True, slots=True)
class Inventory:
    """Content changes of a tier that belongs to this mover alone: first `cleared`, then the rest.

    A key is in at most one list: its state at the time of the message.
    """

    tier: str
    cleared: bool
    added: list[bytes]
    removed: list[bytes]


ToMover = LoadBatch | SaveBatch | StoreBatch | DiscardBatch | CancelBatch
ToDirectory = Loaded | Queued | Cancelled | Copied | Stored | Discarded | Inventory

_KINDS: tuple[type[Any], ...] = (
    LoadBatch, SaveBatch, StoreBatch, DiscardBatch, CancelBatch,
    Loaded, Cancelled, Copied, Stored, Discarded, Inventory, Queued,
)  # fmt: skip
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}


def encode(message: ToMover | ToDirectory) -> bytes:
    """msgpack list: kind number, then the fields in declaration order."""
    packed: bytes = msgpack.packb([_NUMBERS[type(message)], *astuple(message)], use_bin_type=True)
    return packed


def decode(data: bytes) -> Any:
    """The inverse of `encode`. Raises `InvalidInputError` on anything else."""
    try:
        kind, *fields = msgpack.unpackb(data, use_list=True)
        make: Callable[..., Any] = _KINDS[kind]
        return make(*fields)
    except (ValueError, TypeError, IndexError, msgpack.UnpackException) as error:
        raise InvalidInputError(f"not a message of the hierarchy ({len(data)} bytes): {error}") from error
