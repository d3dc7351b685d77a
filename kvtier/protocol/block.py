"""Frames of the block protocol, the pool's data plane. `docs/block-protocol.md` describes it whole.

    frame   = prelude, header, payload
    prelude = magic "KVTF", header length u32, payload length u64; little endian, 16 bytes
    header  = one msgpack map: a request's `id` and `verb`, or an answer's `id` and `result`, and their fields
    payload = raw bytes, whose meaning the header gives

Nothing here does I/O (`kvtier.protocol.block_socket`) or allocates what a peer merely claims.
"""

import enum
import struct
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgpack

from kvtier.errors import (
    InvalidInputError,
    KvtierError,
    LimitExceededError,
    UnauthenticatedError,
    UnavailableError,
)
from kvtier.net.wrong_protocol import BLOCK_MAGIC, WrongProtocolError
from kvtier.system.tracing import NO_CONTEXT, is_context, tracing

VERSIONS = (1,)
"""What this release speaks, the newest first."""
_MOST_SAID = 500
"""Characters of a pool's message that are shown."""
MAX_HEADER_BYTES = 8 << 20
"""The most bytes of a header: more than a write of 65,536 blocks needs."""
MAX_HELLO_BYTES = 8192
"""The most bytes of the header of a HELLO, from a peer that has shown no token yet."""
MAX_FRAME_PAYLOAD_BYTES = 8 << 20
"""The most payload bytes of an answer to `read` with several blocks: what a slow reader holds in place."""
MAX_FRAME_BLOCKS = 1024
"""The most blocks in one answer to `read`."""

_PRELUDE = struct.Struct("<4sIQ")
_MAX_TEXT_BYTES = 4096
_MAX_ITEMS = 256
"""The most items of any list or map in a header, e.g. groups of one namespace and size."""
_MAX_LISTS_AND_MAPS = 1024
"""The most lists and maps in a header: a few bytes each on the wire, and a hundred in memory."""
_PACK_BYTES = 4096
"""What a packer has to begin with; it grows as headers need. By itself, msgpack takes 256 KiB for each connection."""
_UINT64_MAX = 2**64 - 1
_NAMELESS: dict[type[Exception], str] = {
    msgpack.FormatError: "it holds a byte that msgpack does not use, 0xc1",
    msgpack.StackError: "its lists and maps are nested too deeply",
}
"""What the errors of msgpack that have no message mean."""
_E = TypeVar("_E", bound=enum.IntEnum)
_T = TypeVar("_T")


class Verb(enum.StrEnum):
    """What a request asks for."""

    HELLO = "hello"
    LOOKUP = "lookup"
    READ = "read"
    WRITE = "write"
    DISCARD = "discard"
    USAGE = "usage"
    PIN = "pin"
    UNPIN = "unpin"
    ACQUIRE = "acquire"
    RELEASE = "release"
    PREPARE = "prepare"
    COMMIT = "commit"
    ABORT = "abort"
    MAP = "map"


class Result(enum.StrEnum):
    """How a request ended. After anything but OK the pool closes the connection."""

    OK = "ok"
    INVALID = "invalid"
    UNAUTHENTICATED = "unauthenticated"
    INCOMPATIBLE = "incompatible"
    """No protocol version in common; the answer's `versions` are the pool's."""
    LIMIT_EXCEEDED = "limit_exceeded"
    UNAVAILABLE = "unavailable"
    INTERNAL = "internal"


_ERRORS: tuple[tuple[type[KvtierError], Result], ...] = (
    (LimitExceededError, Result.LIMIT_EXCEEDED),
    (UnauthenticatedError, Result.UNAUTHENTICATED),
    (InvalidInputError, Result.INVALID),
)


def result_for(error: KvtierError) -> Result:
    """What a server answers when `error` ended a request."""
    return next((result for kind, result in _ERRORS if isinstance(error, kind)), Result.UNAVAILABLE)


def error_for(result: str, message: str) -> KvtierError:
    """What a client raises for an answer that is not OK, of a newer pool too: `UnavailableError` if in doubt.

    It has the beginning of what the pool says, in printable characters: it goes into logs.
    """
    kind = next((kind for kind, known in _ERRORS if known == result), UnavailableError)
    said = "".join(char if char.isprintable() else "?" for char in f"{result}: {message}"[:_MOST_SAID])
    return kind(said)


def trace_field() -> dict[str, object]:
    """What a request's header has besides, if the calling thread works within a trace: the context, as `trace`."""
    context = tracing.context()
    return {"trace": context} if context else {}


class Fields:
    """A header, or a map inside one. Getters raise `InvalidInputError` when a field is missing or of another kind.

    Fields that nobody asks for are ignored: that is how newer peers talk to older ones.
    """

    __slots__ = ("_fields",)

    def __init__(self, fields: object) -> None:
        if not isinstance(fields, dict):
            raise InvalidInputError(f"header: {type(fields).__name__} where a map belongs")
        self._fields: dict[Any, Any] = fields

    def number(self, name: str) -> int:
        """An integer from 0 to 2**64 - 1."""
        value = self._fields.get(name)
        if type(value) is not int or not 0 <= value <= _UINT64_MAX:  # a bool is none
            raise InvalidInputError(f"header: {name} must be an integer from 0")
        return value

    def text(self, name: str) -> str:
        return self._get(name, str)

    def data(self, name: str) -> bytes:
        value = self._fields.get(name)
        return value if type(value) is bytes else self._get(name, bytes)

    def datas(self, name: str) -> list[bytes]:
        values: list[Any] = self._get(name, list)
        if not all(isinstance(value, bytes) for value in values):
            raise InvalidInputError(f"header: {name} must hold bytes")
        return values

    def has(self, name: str) -> bool:
        """Whether the header has a field that may be left out."""
        return name in self._fields

    def numbers(self, name: str) -> list[int]:
        values: list[Any] = self._get(name, list)
        if not all(type(value) is int for value in values):  # a bool is none
            raise InvalidInputError(f"header: {name} must hold integers")
        return values

    def maps(self, name: str) -> list["Fields"]:
        return [Fields(value) for value in self._get(name, list)]

    def members(self, name: str, kind: type[_E]) -> list[_E]:
        """A byte per item, each a value of `kind`."""
        members = {member.value: member for member in kind}
        try:
            return list(map(members.__getitem__, self.data(name)))
        except KeyError as error:
            raise InvalidInputError(f"header: {name} holds {error}, which is no {kind.__name__}") from None

    def records(self, name: str, kind: struct.Struct) -> list[tuple[Any, ...]]:
        """Packed one after the other."""
        data = self.data(name)
        if len(data) % kind.size:
            raise InvalidInputError(f"header: {name} of {len(data)} bytes: need a multiple of {kind.size}")
        return list(kind.iter_unpack(data))

    def _get(self, name: str, kind: type[_T]) -> _T:
        value = self._fields.get(name)
        if not isinstance(value, kind):
            raise InvalidInputError(f"header: {name} must be {kind.__name__}, is {type(value).__name__}")
        return value


class HeadEncoder:
    """Encodes heads of frames. One thread at a time: it keeps what packing needs, which is half of its price."""

    def __init__(self) -> None:
        self._packer = msgpack.Packer(use_bin_type=True, buf_size=_PACK_BYTES)

    def encode(self, header: Mapping[str, object], payload_bytes: int = 0) -> bytes:
        """Prelude and header of a frame whose payload follows. `LimitExceededError`: the header is too long."""
        packed: bytes = self._packer.pack(header)
        if len(packed) > MAX_HEADER_BYTES:
            raise LimitExceededError(f"header of {len(packed)} bytes, at most {MAX_HEADER_BYTES}; split the batch")
        return _PRELUDE.pack(BLOCK_MAGIC, len(packed), payload_bytes) + packed


def encode_head(header: Mapping[str, object], payload_bytes: int = 0) -> bytes:
    """`HeadEncoder.encode` of a single head. Any thread."""
    return HeadEncoder().encode(header, payload_bytes)


def decode_prelude(prelude: bytes | memoryview, max_header_bytes: int = MAX_HEADER_BYTES) -> tuple[int, int]:
    """Lengths of header and payload. `InvalidInputError` when the peer speaks something else, or too long."""
    magic, header_bytes, payload_bytes = _PRELUDE.unpack(prelude)
    if magic != BLOCK_MAGIC:
        raise WrongProtocolError(bytes(prelude))
    if header_bytes > max_header_bytes:
        raise InvalidInputError(f"header of {header_bytes} bytes: at most {max_header_bytes} here")
    return header_bytes, payload_bytes


def decode_header(packed: bytes | bytearray | memoryview) -> Fields:
    """The header's fields. `InvalidInputError` when this is no msgpack map, or one with too many items."""
    # Each takes a byte at least: a short header cannot have too many.
    hook = _counter() if len(packed) > _MAX_LISTS_AND_MAPS else None
    try:
        fields = msgpack.unpackb(
            packed,
            object_hook=hook,
            list_hook=hook,
            raw=False,
            max_str_len=_MAX_TEXT_BYTES,
            max_bin_len=MAX_HEADER_BYTES,
            max_array_len=_MAX_ITEMS,
            max_map_len=_MAX_ITEMS,
            max_ext_len=0,
        )
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        reason = str(error) or _NAMELESS.get(type(error), type(error).__name__)
        raise InvalidInputError(f"header: {reason}") from error
    return Fields(fields)


def _counter() -> Callable[[_T], _T]:
    """Passes on as many containers as a header may have, then raises `ValueError`."""
    num_left = _MAX_LISTS_AND_MAPS

    def counted(container: _T) -> _T:
        nonlocal num_left
        num_left -= 1
        if num_left < 0:
            raise ValueError(f"more than {_MAX_LISTS_AND_MAPS} lists and maps")
        return container

    return counted


def trace_of(request: Fields) -> str:
    """The context that a request is made within; `NO_CONTEXT` also for a text that is none."""
    if not request.has("trace"):
        return NO_CONTEXT
    context = request.text("trace")
    return context if is_context(context) else NO_CONTEXT
