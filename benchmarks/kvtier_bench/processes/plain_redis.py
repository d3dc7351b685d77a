"""Plain redis-py beside our Redis tier: one pipeline for each call, against the same server. Verifies nothing."""

from collections.abc import Sequence

import redis

from kvtier.identity.keys import StoreKey
from kvtier.memory.buffers import ReadableBuffer
from kvtier.memory.pages import copy_bytes
from kvtier.tiers.base import Item, Status, WriteStatus


class PlainRedis:
    """`Moves` over redis-py, payloads alone, at names that the tier does not use. One thread."""

    def __init__(self, url: str) -> None:
        self._client = redis.Redis.from_url(url)

    def read(self, keys: Sequence[StoreKey], into: Sequence[memoryview]) -> list[Status]:
        """Copies each value over its buffer."""
        pipeline = self._client.pipeline(transaction=False)
        for key in keys:
            pipeline.get(_name(key))
        statuses = []
        for buffer, value in zip(into, pipeline.execute(), strict=True):
            if value is not None:
                copy_bytes(buffer, value)
            statuses.append(Status.MISS if value is None else Status.HIT)
        return statuses

    def write(self, items: Sequence[Item[ReadableBuffer]]) -> list[WriteStatus]:
        """Sets each value."""
        pipeline = self._client.pipeline(transaction=False)
        for key, payload, _ in items:
            pipeline.set(_name(key), payload)
        return [WriteStatus.STORED if answer else WriteStatus.FAILED for answer in pipeline.execute()]

    def discard(self, keys: Sequence[StoreKey]) -> int:
        """Removes the values as the tier does."""
        return int(self._client.unlink(*map(_name, keys)))

    def close(self) -> None:
        """Closes its connections."""
        self._client.close()


def _name(key: StoreKey) -> bytes:
    return b"plain:" + key
