"""`Frames` of pool.proto, encoded and decoded by hand.

The bytes are ordinary protobuf, so any language may use the .proto; but protobuf's own `bytes` field
costs a copy and an allocation each way, which at block sizes is most of the time. `encode_blocks` joins
each message once, `decode_frames` slices and copies nothing. `tests/protocol/test_frames.py` holds both
against protobuf itself.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

from kvtier.errors import InvalidInputError, LimitExceededError
from kvtier.memory.buffers import ReadableBuffer

MAX_FRAME_PAYLOAD_BYTES = 1 << 20
"""Payload bytes in one frame. A larger block takes several."""

_MESSAGE_PAYLOAD_BYTES = MAX_FRAME_PAYLOAD_BYTES
_FRAME_COST_BYTES = 128
"""What a frame takes beside its payload, header included; bounds messages full of misses."""
_FRAME_TAG = 0x0A
_BLOCK_TAG, _STATUS_TAG, _HEADER_TAG, _PAYLOAD_TAG = 0x08, 0x10, 0x1A, 0x22
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_UINT32_MAX, _INT32_MAX = 2**32 - 1, 2**31 - 1
_MOST_SHORT, _MOST_LONG = 5, 10
"""Bytes of a number: of tags and lengths, as protobuf's own parser has it, and of values."""
_EMPTY = memoryview(b"")


@dataclass(frozen=True, slots=True)
class Frame:
    """One piece of one block. `header` and `payload` are views of the message: copy what you keep."""

    block: int
    status: int
    header: memoryview
    payload: memoryview


def encode_blocks(blocks: Iterable[tuple[int, int, bytes, ReadableBuffer]]) -> Iterator[bytes]:
    """`Frames` messages of these blocks, in order, each as full as the limits allow.

    Lazy: takes a block when it is needed, and has copied its payload, once, when it takes the one after
    the next message.

    :param blocks: (index in the batch, `Status` of a read or 0, stored-form header, payload as stored);
        a miss has empty header and payload.
    """
    parts: list[ReadableBuffer] = []
    num_bytes = 0
    for block, status, header, payload in blocks:
        prefix = _varint_field(_BLOCK_TAG, block) + _varint_field(_STATUS_TAG, status)
        head = prefix + _bytes_head(_HEADER_TAG, len(header)) + header
        view = memoryview(payload)
        for start in range(0, max(1, len(view)), MAX_FRAME_PAYLOAD_BYTES):
            part = view[start : start + MAX_FRAME_PAYLOAD_BYTES]
            if parts and num_bytes + len(part) > _MESSAGE_PAYLOAD_BYTES:
                yield b"".join(parts)
                parts, num_bytes = [], 0
            fields = (head if start == 0 else prefix) + _bytes_head(_PAYLOAD_TAG, len(part))
            parts += (bytes((_FRAME_TAG,)), _varint(len(fields) + len(part)), fields, part)
            num_bytes += _FRAME_COST_BYTES + len(part)
    if parts:
        yield b"".join(parts)


def decode_frames(message: ReadableBuffer) -> Iterator[Frame]:
    """The frames in a `Frames` message, in order, copying nothing.

    Like every protobuf reader it takes fields in any order, lets the last of several win and skips
    fields it does not know. Raises `InvalidInputError` when this is no valid protobuf, when `block`
    or `status` does not fit 32 bits or when a frame is longer than the documented limit.
    """
    for tag, _, data in _fields(memoryview(message)):
        if tag == _FRAME_TAG:
            yield _decode_frame(data)


def require_few_fields(message: ReadableBuffer, most: int) -> None:
    """Raises `LimitExceededError` for a message with more fields than that, before anybody makes objects of them. What
    is no valid protobuf ends where its valid part does."""
    num_fields = 0
    with suppress(InvalidInputError):
        for _ in islice(_fields(memoryview(message)), most + 1):
            num_fields += 1
    if num_fields > most:
        raise LimitExceededError(f"more than {most} groups in one request; put keys of one namespace into one group")


def _decode_frame(view: memoryview) -> Frame:
    block = status = 0
    header = payload = _EMPTY
    for tag, value, data in _fields(view):
        if tag == _BLOCK_TAG:
            block = value
        elif tag == _STATUS_TAG:
            status = value
        elif tag == _HEADER_TAG:
            header = data
        elif tag == _PAYLOAD_TAG:
            payload = data
    if block > _UINT32_MAX or status > _INT32_MAX or len(payload) > MAX_FRAME_PAYLOAD_BYTES:
        raise InvalidInputError(
            f"frame of block {block} with status {status} and {len(payload)} payload bytes: at most "
            f"{MAX_FRAME_PAYLOAD_BYTES} in a frame, and no number has more than 32 bits"
        )
    return Frame(block, status, header, payload)


def _fields(view: memoryview) -> Iterator[tuple[int, int, memoryview]]:
    """(tag, integer, bytes) of each field; of the last two, the one that its wire type does not have is empty."""
    position = 0
    while position < len(view):
        tag, position = _read_varint(view, position, _MOST_SHORT)
        if tag >> 3 == 0 or tag > _UINT32_MAX:
            raise InvalidInputError(f"frame: field number {tag >> 3} does not exist")
        value, data, position = _read_value(view, tag & 7, position)
        yield tag, value, data


def _read_value(view: memoryview, wire_type: int, position: int) -> tuple[int, memoryview, int]:
    """(integer, bytes, position behind): of the first two, the one that the wire type does not have is empty."""
    if wire_type == _VARINT:
        value, position = _read_varint(view, position)
        return value, _EMPTY, position
    if wire_type == _BYTES:
        length, position = _read_varint(view, position, _MOST_SHORT)
    elif wire_type == _FIXED64:
        length = 8
    elif wire_type == _FIXED32:
        length = 4
    else:
        raise InvalidInputError(f"frame: wire type {wire_type} is not used")
    end = position + length
    if end > len(view):
        raise InvalidInputError(f"frame: a field of {length} bytes, {len(view) - position} left")
    return 0, view[position:end], end


def _read_varint(view: memoryview, position: int, most: int = _MOST_LONG) -> tuple[int, int]:
    """(value, position behind) of a varint of at most 64 bits, in at most so many bytes."""
    value = 0
    for i, byte in enumerate(view[position : position + most]):
        value |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            if value >= 1 << 64:
                break
            return value, position + i + 1
    raise InvalidInputError(f"frame: a number is torn, or longer than 64 bits or {most} bytes")


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _varint_field(tag: int, value: int) -> bytes:
    """Empty for zero, as protobuf leaves out fields that hold their default."""
    return bytes((tag,)) + _varint(value) if value else b""


def _bytes_head(tag: int, length: int) -> bytes:
    return bytes((tag,)) + _varint(length) if length else b""
