"""KV events as vLLM 0.32 publishes them (`vllm/distributed/kv_events.py`), so that its subscribers decode them.

A batch is a msgpack array of a time in seconds since 1970, events, and a rank; an event is a map with its class's name
as `type`. vLLM leaves out fields with their defaults, and so do we. `tests/vllm/test_own_events.py` holds this against
vLLM's own classes.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgpack

from kvtier.identity.keys import BlockKey

Event = dict[str, Any]
HashForm = Literal["int64", "bytes"]
"""The last 64 bits of a block's hash as an integer, which is vLLM's default and what routers expect; or all bytes."""

CLEARED: Event = {"type": "AllBlocksCleared"}
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
"""What stands in place of the sequence number after the last batch of a replay."""
_ONLY_GROUP = 0
_HASH_BYTES = {"int64": 8, "bytes": 32}


class Place(NamedTuple):
    """A tier, as events name it."""

    medium: str
    locality: str | None = None


DEVICE_PLACE = Place("GPU")
"""vLLM's name for what an engine computes with, on the CPU, too."""
HOST_PLACE = Place("CPU")
DISK_PLACE = Place("STORAGE", "LOCAL")


def external_hash(key: BlockKey, form: HashForm) -> int | bytes:
    """What events call a block: its place in the chain of its tenant, the same in all engines of that tenant."""
    end = key[-_HASH_BYTES[form] :]
    return int.from_bytes(end, "big") if form == "int64" else bytes(end)


def stored(
    hashes: Sequence[int | bytes],
    parent: int | bytes | None,
    tokens: Sequence[int],
    block_size: int,
    place: Place,
) -> Event:
    """Blocks that follow each other have come to a tier.

    :param parent: of the first of them; None: it begins its prompt.
    :param tokens: of all of them.
    """
    event: Event = {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": block_size,
        "lora_id": None,
        "medium": place.medium,
        "lora_name": None,
        "group_idx": _ONLY_GROUP,
        "kv_cache_spec_kind": "full_attention",
    }
    return event if place.locality is None else event | {"locality": place.locality}


def removed(hashes: Sequence[int | bytes], place: Place) -> Event:
    """Blocks have gone from a tier."""
    event: Event = {
        "type": "BlockRemoved",
        "block_hashes": list(hashes),
        "medium": place.medium,
        "group_idx": _ONLY_GROUP,
    }
    return event if place.locality is None else event | {"locality": place.locality}


def pack_batch(events: Sequence[Event], at_s: float) -> bytes:
    """:param at_s: seconds since 1970."""
    packed: bytes = msgpack.packb([at_s, list(events), 0])
    return packed
