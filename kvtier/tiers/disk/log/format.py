"""How a segment looks on disk: its header page, extents of records and tombstones, its footer.

`docs/disk-format.md` is the specification; this module and `kvtier.codec.stored_form` are the only ones that know it.
Everything
is little endian and in whole pages of 4 KiB. Nothing here does I/O.

    page 0    segment header: whose segment, which number, a nonce that nobody who writes blocks knows
    page 1..  extents: a head with one entry per record or tombstone, then the payloads, each on a page of its own
    last      footer, once the segment is sealed: all entries of all extents, and where the footer begins
"""

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.codec.stored_form import HEADER_BYTES, HEADER_DTYPE, well_formed
from kvtier.identity.keys import STORE_KEY_BYTES, TENANT_ID_BYTES, StoreKey, TenantId

PAGE = 4096
"""The unit of the format, whatever pages the machine has: what O_DIRECT asks of offsets and lengths."""
VERSION = 2
"""The version of the format; version 1 was a file per block."""
NONCE_BYTES = 16
MAX_NUMBER = 2**32 - 1
"""The largest number that a segment may have."""
MAX_PAGES = 2**32 - 1
"""The most pages that a segment may have."""
MAX_STORED_BYTES = 2**32 - 1
"""The most bytes that a payload may have as stored."""

_EPOCHS_END = 2**63
"""Epochs are below this. No folder lives so long, and there must be larger ones for what comes next."""
_SEGMENT_MAGIC = b"KVTSEGMT"
_EXTENT_MAGIC = b"KVTEXTNT"
_FOOTER_MAGIC = b"KVTINDEX"
_TRAILER_MAGIC = b"KVTTRAIL"
_HEADER = struct.Struct("<8sII16s16sQQ")  # magic, version, page size, tenant, nonce, number, epoch
_HEAD = struct.Struct("<8s16s16sQIII4x")  # magic, nonce, tenant, number, own page, pages, entries
_TRAILER = struct.Struct("<8sIIQ")  # magic, the footer's first page, entries, number
_CHECKSUM = struct.Struct("<Q")
_HEAD_BYTES = _HEAD.size + _CHECKSUM.size
_TRAILER_BYTES = _TRAILER.size + _CHECKSUM.size

ENTRY = np.dtype(
    [("header", HEADER_DTYPE), ("epoch", "<u8"), ("page", "<u4"), ("kind", "u1"), ("reserved", "V3")], align=False
)
"""One record or tombstone. `page` is where the payload begins, counted from the start of the segment."""
Entries = npt.NDArray[np.void]
"""One dimension of `ENTRY`."""
NO_ENTRIES: Entries = np.empty(0, ENTRY)


class Kind(enum.IntEnum):
    """What an entry says."""

    RECORD = 0
    """Here is the payload of a key, of this epoch."""
    FORGET = 1
    """Copies of this key with a smaller epoch are not there, wherever they are written."""
    PURGE = 2
    """Records of this tenant with a smaller epoch are not there. The key is the tenant id, then zeros."""


@dataclass(frozen=True, slots=True)
class SegmentId:
    """What every part of a segment says of itself."""

    number: int
    """The segment's number, from 1: larger than that of any segment before it in the folder."""
    tenant: TenantId
    nonce: bytes
    """Random. A payload that looks like an extent does not know it."""


class NewerFormatError(Exception):
    """A well-formed header of a version that this release does not know."""


def pages_of(nbytes: int) -> int:
    """Pages that so many bytes take."""
    return -(-nbytes // PAGE)


def head_pages(num_entries: int) -> int:
    """Pages before the payloads of an extent."""
    return pages_of(_HEAD_BYTES + num_entries * ENTRY.itemsize)


def footer_pages(num_entries: int) -> int:
    return pages_of(_HEAD_BYTES + num_entries * ENTRY.itemsize + _TRAILER_BYTES)


def pack_header(segment: SegmentId, epoch: int) -> bytes:
    """Page 0. `epoch`: the first that a record of this segment may have; for people."""
    fields = _HEADER.pack(_SEGMENT_MAGIC, VERSION, PAGE, segment.tenant, segment.nonce, segment.number, epoch)
    return _sealed(fields).ljust(PAGE, b"\0")


def parse_header(page: memoryview) -> SegmentId | None:
    """The inverse; None for what is not whole. Raises `NewerFormatError` for another version."""
    magic, version, page_bytes, tenant, nonce, number, _ = _HEADER.unpack_from(page)
    if magic != _SEGMENT_MAGIC or not _is_sealed(page, _HEADER.size):
        return None
    if version != VERSION or page_bytes != PAGE:
        raise NewerFormatError(f"version {version}, pages of {page_bytes}")
    return SegmentId(number, TenantId(tenant), nonce)


def may_be_ours(page: memoryview) -> bool:
    """Whether a first page without a sound header began as one: it has the magic, or was never written."""
    return page[:8] == _SEGMENT_MAGIC or not np.frombuffer(page, np.uint8).any()


def has_magic(pages: memoryview) -> bool:
    """Whether any page begins like an extent or a footer, of whatever segment."""
    words = np.frombuffer(pages, "S8").reshape(-1, PAGE // 8)[:, 0]
    return bool(np.isin(words, [_EXTENT_MAGIC, _FOOTER_MAGIC]).any())


def make_entries(
    headers: Sequence[bytes], epochs: Sequence[int], pages: Sequence[int], kinds: Sequence[Kind]
) -> Entries:
    """Entries made from stored-form headers and from where their payloads will be."""
    entries = np.zeros(len(headers), ENTRY)
    entries["header"] = np.frombuffer(b"".join(headers), HEADER_DTYPE)
    entries["epoch"], entries["page"], entries["kind"] = epochs, pages, kinds
    return entries


def pack_extent_head(segment: SegmentId, page: int, num_pages: int, entries: Entries) -> bytes:
    """What stands before the payloads of an extent that begins at `page`: whole pages."""
    return _head(_EXTENT_MAGIC, segment, page, num_pages, entries).ljust(head_pages(len(entries)) * PAGE, b"\0")


def pack_footer(segment: SegmentId, page: int, entries: Entries) -> bytes:
    """The end of a sealed segment, from `page` on: whole pages."""
    num_pages = footer_pages(len(entries))
    trailer = _sealed(_TRAILER.pack(_TRAILER_MAGIC, page, len(entries), segment.number))
    head = _head(_FOOTER_MAGIC, segment, page, num_pages, entries)
    return head.ljust(num_pages * PAGE - _TRAILER_BYTES, b"\0") + trailer


@dataclass(frozen=True, slots=True)
class Head:
    """A sound beginning of an extent or footer. Its entries are not yet looked at."""

    segment: SegmentId
    page: int
    num_pages: int
    num_entries: int


def parse_extent_head(buffer: memoryview) -> Head | None:
    """The fields at the start of `buffer`, unverified; None when there is no head."""
    return _parse_head(buffer, _EXTENT_MAGIC)


def parse_trailer(page: memoryview) -> tuple[int, int] | None:
    """First page of the footer and number of entries, from the last page of a segment; None: not sealed."""
    start = PAGE - _TRAILER_BYTES
    magic, first, num_entries, _ = _TRAILER.unpack_from(page, start)
    if magic != _TRAILER_MAGIC or not _is_sealed(page[start:], _TRAILER.size):
        return None
    return first, num_entries


def parse_footer(buffer: memoryview, page: int) -> tuple[SegmentId, Entries] | None:
    """The footer that begins at `page`, verified; None for what is not whole or elsewhere."""
    head = _parse_head(buffer, _FOOTER_MAGIC)
    if head is None or head.page != page or head.num_pages * PAGE != len(buffer):
        return None
    entries = read_entries(buffer, head, page)
    return None if entries is None else (head.segment, entries)


def read_entries(buffer: memoryview, head: Head, end_page: int) -> Entries | None:
    """A copy of the entries behind `head`; None when the checksum does not hold or they are no entries.

    :param buffer: from the head on, all of its pages.
    :param end_page: payloads lie before it.
    """
    nbytes = head.num_entries * ENTRY.itemsize
    if len(buffer) < _HEAD_BYTES + nbytes:
        return None
    hasher = xxhash.xxh3_64(buffer[: _HEAD.size])
    hasher.update(buffer[_HEAD_BYTES : _HEAD_BYTES + nbytes])
    if _CHECKSUM.unpack_from(buffer, _HEAD.size) != (hasher.intdigest(),):
        return None
    entries = np.frombuffer(buffer, ENTRY, head.num_entries, _HEAD_BYTES).copy()
    return entries if _are_sound(entries, head.segment.tenant, end_page) else None


def find_extent_heads(pages: memoryview, segment: SegmentId) -> list[int]:
    """Indices of pages that begin like an extent of this segment."""
    words = np.frombuffer(pages, np.uint8).reshape(-1, PAGE)[:, :24]
    prefix = np.frombuffer(_EXTENT_MAGIC + segment.nonce, np.uint8)
    return [int(index) for index in np.flatnonzero((words == prefix).all(axis=1))]


def keys_of(entries: Entries) -> list[StoreKey]:
    """The entries' keys. About 0.1 us each."""
    raw = np.ascontiguousarray(entries["header"]["key"]).tobytes()
    return [StoreKey(raw[at : at + STORE_KEY_BYTES]) for at in range(0, len(raw), STORE_KEY_BYTES)]


def header_bytes(entries: Entries, index: int) -> bytes:
    """The stored-form header of one entry."""
    return entries["header"][index].tobytes()  # type: ignore[no-any-return]


def purge_key(tenant: TenantId) -> StoreKey:
    """What a `PURGE` entry has in the place of a key."""
    return StoreKey(tenant + bytes(STORE_KEY_BYTES - TENANT_ID_BYTES))


def _are_sound(entries: Entries, tenant: TenantId, end_page: int) -> bool:
    headers = entries["header"]
    first = np.ascontiguousarray(headers["key"]).view(np.uint8).reshape(-1, STORE_KEY_BYTES)[:, :TENANT_ID_BYTES]
    records = entries["kind"] == Kind.RECORD
    ends = entries["page"].astype(np.int64) + -(-headers["stored_length"].astype(np.int64) // PAGE)
    return bool(
        (entries["kind"] <= max(Kind)).all()
        and (entries["epoch"] < _EPOCHS_END).all()
        and well_formed(headers).all()
        and (headers["stored_length"] <= MAX_STORED_BYTES).all()
        and (headers["raw_length"] <= MAX_STORED_BYTES).all()
        and (first == np.frombuffer(tenant, np.uint8)).all()
        and ((entries["page"] >= 1) & (ends <= end_page))[records].all()
    )


def _head(magic: bytes, segment: SegmentId, page: int, num_pages: int, entries: Entries) -> bytes:
    fields = _HEAD.pack(magic, segment.nonce, segment.tenant, segment.number, page, num_pages, len(entries))
    packed = entries.tobytes()
    return fields + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields + packed)) + packed


def _parse_head(buffer: memoryview, expected: bytes) -> Head | None:
    if len(buffer) < _HEAD_BYTES:
        return None
    magic, nonce, tenant, number, page, num_pages, num_entries = _HEAD.unpack_from(buffer)
    if magic != expected:
        return None
    return Head(SegmentId(number, TenantId(tenant), nonce), page, num_pages, num_entries)


def _sealed(fields: bytes) -> bytes:
    return fields + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))


def _is_sealed(buffer: memoryview, nbytes: int) -> bool:
    (checksum,) = _CHECKSUM.unpack_from(buffer, nbytes)
    return bool(checksum == xxhash.xxh3_64_intdigest(buffer[:nbytes]))


assert ENTRY.itemsize == HEADER_BYTES + 16
