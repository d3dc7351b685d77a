"""Batches of KV events as vLLM 0.32 and kvtier's engine publish them (docs/kv-events.md)."""

from collections.abc import Iterator
from typing import Any

import msgpack

from kvtier_gateway.events.block_names import BlockNames
from kvtier_gateway.routing.values import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent, Medium

_MEDIA = {medium.value: medium for medium in Medium}
_MALFORMED = (AttributeError, KeyError, TypeError, ValueError, OverflowError, msgpack.UnpackException)


def events_in(batch: bytes, names: BlockNames) -> list[KvEvent]:
    """What the batch tells of devices and host memory. Raises `ValueError` for what is no batch: `names` may have
    taken in part of it then."""
    try:
        _, events, *_ = msgpack.unpackb(batch)
        return list(_known(events, names))
    except _MALFORMED as error:
        raise ValueError(f"no batch of KV events: {type(error).__name__}") from error


def _known(events: list[dict[str, Any]], names: BlockNames) -> Iterator[KvEvent]:
    for event in events:
        kind = event["type"]
        if kind == "AllBlocksCleared":
            names.cleared()
            yield BlocksCleared()
            continue
        medium = _MEDIA.get(event.get("medium") or Medium.DEVICE.value)
        if medium is None:
            continue  # a disk
        if kind == "BlockStored" and (keys := names.stored(event, medium)):
            yield BlocksStored(keys, medium)
        elif kind == "BlockRemoved" and (keys := names.removed(event, medium)):
            yield BlocksRemoved(keys, medium)
