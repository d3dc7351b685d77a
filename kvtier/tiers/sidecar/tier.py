"""A tier that is in the tier process, as the engine's threads see it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np

from kvtier.errors import InvalidInputError, InvariantError, UnavailableError
from kvtier.identity.keys import StoreKey
from kvtier.memory.buffers import ReadableBuffer
from kvtier.protocol.block import Fields
from kvtier.tiers.base import Item, Status, Usage, WriteStatus, require_pairs
from kvtier.tiers.common.call_guard import CallGuard
from kvtier.tiers.sidecar.messages import MAX_BLOCKS, Verb, pack_keys, pack_numbers, pack_places
from kvtier.tiers.sidecar.supervisor import TierProcess

_S = TypeVar("_S", Status, WriteStatus)


class SidecarTier:
    """`Tier` over one of a `TierProcess`. Any thread; a call is one round trip, whatever the number of blocks.

    Buffers must be views of the process's memory; others raise `InvalidInputError`. When the process dies or hangs
    the call is answered MISS or FAILED, and counted in `io_errors` as `TierProcess`. No such answer comes before the
    process that was given the buffers has ended.
    """

    def __init__(self, name: str, process: TierProcess) -> None:
        """:param process: stays the caller's, who closes it after all of its tiers."""
        self._name, self._process = name, process
        memory = np.frombuffer(process.memory, dtype=np.uint8)
        self._base, self._end = _address(memory), _address(memory) + memory.size
        self._guard = CallGuard(f"tier {name}")

    @property
    def name(self) -> str:
        return self._name

    def lookup(self, keys: Sequence[StoreKey]) -> list[Status]:
        """Asks the tier's process for a status per key, in order; MISS where it does not answer."""
        statuses: list[Status] = []
        with self._guard:
            for batch in _batches(len(keys)):
                answer = self._ask(Verb.LOOKUP, {"keys": pack_keys(keys[batch])})
                statuses += _each(answer, Status, len(keys[batch]), Status.MISS)
        return statuses

    def read(self, keys: Sequence[StoreKey], into: Sequence[memoryview]) -> list[Status]:
        """Has the tier's process fill `into[i]` with the payload of `keys[i]`; a status per key, MISS where it does not
        answer."""
        require_pairs(keys, into)
        statuses: list[Status] = []
        with self._guard:
            places = [self._place(buffer) for buffer in into]
            for batch in _batches(len(keys)):
                request = {"keys": pack_keys(keys[batch]), "places": pack_places(places[batch])}
                answer = self._ask(Verb.READ, request, uses_memory=True)
                statuses += _each(answer, Status, len(keys[batch]), Status.MISS)
        return statuses

    def write(self, items: Sequence[Item[ReadableBuffer]]) -> list[WriteStatus]:
        """Has the tier's process store payloads; a status per block, in order, FAILED where it does not answer."""
        keys = [key for key, _, _ in items]
        statuses: list[WriteStatus] = []
        with self._guard:
            places = [self._place(payload) for _, payload, _ in items]
            checksums = [checksum for _, _, checksum in items]
            for batch in _batches(len(keys)):
                request = {
                    "keys": pack_keys(keys[batch]),
                    "places": pack_places(places[batch]),
                    "checksums": pack_numbers(checksums[batch]),
                }
                answer = self._ask(Verb.WRITE, request, uses_memory=True)
                statuses += _each(answer, WriteStatus, len(keys[batch]), WriteStatus.FAILED)
        return statuses

    def discard(self, keys: Sequence[StoreKey]) -> int:
        """Forgets these keys; returns how many were there. Without a process all miss at once; the next one forgets
        them before it serves."""
        with self._guard:
            return sum(self._discard(keys[batch]) for batch in _batches(len(keys)))

    def usage(self) -> Usage:
        """Returns how full the tier is. All numbers are zero without a process."""
        with self._guard:
            answer = self._ask(Verb.USAGE, {})
        return Usage(*answer.numbers("usage")) if answer is not None else Usage(0, 0, 0)

    def check(self) -> None:
        """Has the tier's process verify the bookkeeping. Raises `InvariantError`, without a process, too: nothing was
        verified."""
        with self._guard:
            if self._ask(Verb.CHECK, {}) is None:
                raise InvariantError(f"tier {self._name}: no tier process answers, nothing was verified; ask again")

    def close(self) -> None:
        """Waits for calls in flight. The tier itself is closed with its process. Idempotent."""
        self._guard.close()

    def _ask(self, verb: Verb, fields: Mapping[str, object], *, uses_memory: bool = False) -> Fields | None:
        """None when the process has no answer."""
        try:
            return self._process.call(verb, {"tier": self._name, **fields}, uses_memory=uses_memory)
        except UnavailableError:
            self._count_error(verb)
            return None

    def _discard(self, keys: Sequence[StoreKey]) -> int:
        try:
            return self._process.discard(self._name, keys)
        except UnavailableError:
            self._count_error(Verb.DISCARD)
            return 0

    def _count_error(self, verb: Verb) -> None:
        self._process.metrics.io_errors.labels(self._name, verb, "TierProcess").inc()

    def _place(self, buffer: ReadableBuffer) -> tuple[int, int]:
        start = _address(np.frombuffer(buffer, dtype=np.uint8)) if len(buffer) else self._base
        if not self._base <= start <= start + len(buffer) <= self._end:
            raise InvalidInputError(f"tier {self._name}: a buffer that is not in the memory of the tier process")
        return start - self._base, len(buffer)


def _address(array: "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]") -> int:
    return int(array.__array_interface__["data"][0])


def _batches(num_blocks: int) -> Iterator[slice]:
    for start in range(0, num_blocks, MAX_BLOCKS):
        yield slice(start, start + MAX_BLOCKS)


def _each(answer: Fields | None, kind: type[_S], num_blocks: int, otherwise: _S) -> list[_S]:
    """A status per block."""
    if answer is None:
        return [otherwise] * num_blocks
    statuses = answer.members("statuses", kind)
    if len(statuses) != num_blocks:
        raise InvalidInputError(f"the tier process answered {len(statuses)} statuses for {num_blocks} blocks")
    return statuses
