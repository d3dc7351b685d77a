"""Batches of KV events as vLLM 0.32 and kvtier's engine publish them (docs/kv-events.md)."""

from collections.abc import Iterator
from typing import Any

import msgpack

from kvtier_gateway.routing.values import BlocksCleared, BlocksRemoved, BlocksStored, Key, KvEvent, Medium

_MEDIA = {medium.value: medium for medium in Medium}


def events_in(batch: bytes) -> list[KvEvent]:
    """What the batch tells of devices and host memory. Raises `ValueError` for what is no batch."""
    try:
        _, events, *_ = msgpack.unpackb(batch)
        return list(_known(events))
    except (KeyError, TypeError, ValueError, msgpack.UnpackException) as error:
        raise ValueError(f"no batch of KV events: {type(error).__name__}") from error


def _known(events: list[dict[str, Any]]) -> Iterator[KvEvent]:
    for event in events:
        kind = event["type"]
        if kind == "AllBlocksCleared":
            yield BlocksCleared()
            continue
        medium = _MEDIA.get(event.get("medium") or Medium.DEVICE.value)
        if medium is None:
            continue  # a disk
        if kind == "BlockStored":
            yield BlocksStored(_keys(event["block_hashes"]), medium)
        elif kind == "BlockRemoved":
            yield BlocksRemoved(_keys(event["block_hashes"]), medium)


def _keys(hashes: list[int | bytes]) -> list[Key]:
    """The last 64 bits of each."""
    return [each if isinstance(each, int) else int.from_bytes(each[-8:], "big") for each in hashes]
