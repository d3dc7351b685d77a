"""A segment as kvtier writes it, always the same but for random parts of sealed blocks; its checksums are right."""

import functools
import struct

import numpy as np
import xxhash

from fuzz_target import payload_of
from kvtier.codec.checksums import checksum
from kvtier.codec.sealed_form import StorageSeals, seal
from kvtier.codec.stored_form import Codec, encode, encode_header
from kvtier.testing.blocks import TENANT, make_key
from kvtier.tiers.disk.log.format import (
    PAGE,
    Entries,
    Kind,
    SegmentId,
    head_pages,
    make_entries,
    pack_extent_head,
    pack_footer,
    pack_header,
    pages_of,
)
from seal_rig import seals, storage_keys

NBYTES = 600
KEYS = [make_key(label) for label in range(6)]
SEALS: StorageSeals = seals(1, reads_plain=True)
EXTENT, FOOTER = b"KVTEXTNT", b"KVTINDEX"
HEAD_BYTES = 72
"""The head of an extent or a footer, before the entries."""
_HEADER_SUMMED, _HEAD_SUMMED, _TRAILER_BYTES = 64, 64, 32
_ENTRY_BYTES = 112
_SEALED_FORM = 3
_EXTENTS = ((0, 1, 2), (3, 4, 5))


@functools.cache
def image(number: int, form: int, *, is_sealed: bool) -> bytes:
    """Two extents of three records each, and one of a tombstone for key 1; with a footer if `is_sealed`.

    :param form: a `Codec`, or 3 for sealed blocks.
    """
    segment = SegmentId(number, TENANT, bytes([number]) * 16)
    pages, everything = [pack_header(segment, 4)], list[Entries]()
    for labels in _EXTENTS:
        blocks = [_stored(label, form) for label in labels]
        pages += _extent(segment, sum(map(len, pages)) // PAGE, blocks, 5, Kind.RECORD, everything)
    pages += _extent(
        segment, sum(map(len, pages)) // PAGE, [(encode_header(KEYS[1], b""), b"")], 6, Kind.FORGET, everything
    )
    if is_sealed:
        pages.append(pack_footer(segment, sum(map(len, pages)) // PAGE, np.concatenate(everything)))
    return b"".join(pages)


def mended_heads(pages: bytearray) -> bytes:
    """With right checksums in the segment's header, in all that begins like an extent or footer, and in the trailer."""
    pages = pages.ljust(PAGE, b"\0")
    struct.pack_into("<Q", pages, _HEADER_SUMMED, xxhash.xxh3_64_intdigest(bytes(pages[:_HEADER_SUMMED])))
    for at in range(0, len(pages) - HEAD_BYTES, PAGE):
        if pages[at : at + 8] in (EXTENT, FOOTER):
            (count,) = struct.unpack_from("<I", pages, at + 56)
            entries = pages[at + HEAD_BYTES : at + HEAD_BYTES + count * _ENTRY_BYTES]
            summed = xxhash.xxh3_64_intdigest(bytes(pages[at : at + _HEAD_SUMMED] + entries))
            struct.pack_into("<Q", pages, at + _HEAD_SUMMED, summed)
    start = len(pages) // PAGE * PAGE - _TRAILER_BYTES
    struct.pack_into("<Q", pages, start + 24, xxhash.xxh3_64_intdigest(bytes(pages[start : start + 24])))
    return bytes(pages)


def _stored(label: int, form: int) -> tuple[bytes, bytes]:
    payload = payload_of(NBYTES, label)
    summed = checksum(KEYS[label], payload)
    if form == _SEALED_FORM:
        header, stored = seal(KEYS[label], payload, summed, Codec.LZ4, storage_keys(1))
    else:
        header, stored = encode(KEYS[label], payload, summed, Codec(form))  # type: ignore[assignment]
    return header, bytes(stored)


def _extent(
    segment: SegmentId, page: int, blocks: list[tuple[bytes, bytes]], epoch: int, kind: Kind, into: list[Entries]
) -> list[bytes]:
    places, at = [], page + head_pages(len(blocks))
    for _, stored in blocks:
        places.append(at)
        at += pages_of(len(stored))
    entries = make_entries([head for head, _ in blocks], [epoch] * len(blocks), places, [kind] * len(blocks))
    into.append(entries)
    payloads = [stored.ljust(pages_of(len(stored)) * PAGE, b"\0") for _, stored in blocks]
    return [pack_extent_head(segment, page, at - page, entries), *payloads]
