"""Target: what a pool makes of the values that a Redis answers with.

input = flags, then for each value: kind (u8), length (u16), bytes
"""

import contextlib
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import redis

from codec_rig import build_v1
from fuzz_memory import GuardedMemory
from fuzz_mending import HEADER_BYTES, mended_block
from fuzz_target import MENDED, Execute, Target, flagged, payload_of
from kvtier.codec.checksums import checksum
from kvtier.codec.sealed_form import seal
from kvtier.codec.stored_form import Codec, encode
from kvtier.errors import InvalidInputError
from kvtier.metrics import Metrics
from kvtier.testing.blocks import make_key
from kvtier.tiers.common.packer import BlockPacker
from kvtier.tiers.redis.blocks import BlockFormat
from kvtier.tiers.redis.commands import Command, key_name
from kvtier.tiers.redis.exchange import Take
from kvtier.tiers.redis.reader import BlockReader
from kvtier.tiers.redis.servers import Work
from seal_rig import seals, storage_keys

_SIZE = 1500
_PART_BYTES = 500
"""The most bytes of one value: blocks that do not pack come in three."""
_KEYS = [make_key(label) for label in range(3)]
_NAMES = [key_name(key) for key in _KEYS]
_PAYLOADS = [payload_of(_SIZE, label) for label in range(3)]
_HAS_KEYS, _READS_PLAIN = 0x02, 0x04
_VALUE = struct.Struct("<BH")
_STRING, _GONE, _WRONG_TYPE, _NUMBER = range(4)


def _values(label: int, header: bytes, stored: bytes) -> list[bytes]:
    """A block as it is asked for: the first part with the header, then the others."""
    return [
        header + stored[:_PART_BYTES],
        *(stored[at : at + _PART_BYTES] for at in range(_PART_BYTES, len(stored), _PART_BYTES)),
    ]


def _packed(values: Sequence[bytes]) -> bytes:
    return b"".join(_VALUE.pack(_STRING, len(value)) + value for value in values)


def _seeds() -> list[bytes]:
    """Three blocks of each form: the first values of all, then the further parts, as a reader asks for them."""
    bodies = [_VALUE.pack(_GONE, 0) * 3, _VALUE.pack(_WRONG_TYPE, 0) + _VALUE.pack(_NUMBER, 7)]
    for form in range(7):
        blocks = []
        for label, (key, payload) in enumerate(zip(_KEYS, _PAYLOADS, strict=True)):
            summed, codec = checksum(key, payload), Codec(form % 3)
            if form == 6:
                header, stored = seal(key, payload, summed, Codec.LZ4, storage_keys(1))
            elif form >= 3:
                header, stored = build_v1(key, payload, codec)  # type: ignore[assignment]
            else:
                header, stored = encode(key, payload, summed, codec)  # type: ignore[assignment]
            blocks.append(_values(label, header, bytes(stored)))
        bodies.append(_packed([values[0] for values in blocks] + [part for values in blocks for part in values[1:]]))
    return [flagged(flags, body) for body in bodies for flags in range(8)]


class _Talk:
    """A `Conversation` whose answers are there already, in order; nothing is there once they are used up."""

    def __init__(self, data: bytes, *, is_mended: bool) -> None:
        self._data, self._at = data, 0
        self._is_mended = is_mended
        self._num_taken = 0

    def ask(self, commands: Iterable[Command], take: Take, accepts: object = None) -> list[int]:
        for position, _ in enumerate(commands):
            take(position, self._next())
        return []

    def each(self, op: str, names: Sequence[bytes], sizes: Sequence[int], work: Work, deadline: float) -> int:
        return len(work(self, list(range(len(names)))))  # type: ignore[arg-type]

    def _next(self) -> Any:
        if self._at + _VALUE.size > len(self._data):
            return None
        kind, length = _VALUE.unpack_from(self._data, self._at)
        start = self._at + _VALUE.size
        self._at = start + length
        self._num_taken += 1
        if kind % 4 == _STRING:
            value = self._data[start : self._at]
            if self._is_mended and self._num_taken <= len(_KEYS) and len(value) >= HEADER_BYTES:
                return mended_block(value, _KEYS[self._num_taken - 1])
            return value
        return {_GONE: None, _WRONG_TYPE: redis.ResponseError("WRONGTYPE"), _NUMBER: length}[kind % 4]


@contextlib.contextmanager
def _redis() -> Iterator[Execute]:
    """One read of three blocks. A hit is the block of its key, unless it lies raw there and its checksum was forged."""
    memories = [GuardedMemory(_SIZE) for _ in _KEYS]
    forms = {
        flags: BlockFormat(
            BlockPacker(
                Codec.RAW,
                tier="fuzz",
                metrics=Metrics(),
                **({"seals": seals(1, reads_plain=bool(flags & _READS_PLAIN))} if flags & _HAS_KEYS else {}),
            ),
            ttl_ms=0,
            max_value_bytes=_PART_BYTES,
        )
        for flags in (0, _HAS_KEYS, _READS_PLAIN, _HAS_KEYS | _READS_PLAIN)
    }

    def execute(data: bytes) -> None:
        if not data:
            return
        is_mended, flags = bool(data[0] & MENDED), data[0] & (_HAS_KEYS | _READS_PLAIN)
        talk = _Talk(data[1:], is_mended=is_mended)
        into = [memory.lend(_SIZE) for memory in memories]
        reader = BlockReader(_KEYS, _NAMES, into, forms[flags])
        try:
            reader.read_firsts(talk, list(range(len(_KEYS))))  # type: ignore[arg-type]
            reader.read_parts(talk, 1e12)  # type: ignore[arg-type]
        except InvalidInputError as error:
            if "where a string belongs" not in str(error):
                raise
        for memory in memories:
            memory.check()
        may_be_forged = is_mended and not (flags & _HAS_KEYS and not flags & _READS_PLAIN)
        for place in reader.hits:
            assert may_be_forged or into[place] == _PAYLOADS[place], "a wrong hit"

    yield execute


REDIS = Target("redis", "values that a Redis answers with, whole and in parts", _seeds, _redis, 16384)
