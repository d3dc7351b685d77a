"""The headers of blocks that a client is about to send: looked at all at once, and made objects of a few at a time."""

import numpy as np

from kvtier.codec.stored_form import HEADER_BYTES, HEADER_DTYPE, Codec, Header, parse_header, sealed, well_formed
from kvtier.errors import CorruptBlockError, InvalidInputError
from kvtier.identity.keys import NAMESPACE_ID_BYTES, STORE_KEY_BYTES, TENANT_ID_BYTES, StoreKey

_KEY = HEADER_DTYPE.fields["key"][1] if HEADER_DTYPE.fields else 0
"""The place at which the key begins in a header."""
_NAMESPACE = _KEY + TENANT_ID_BYTES


class AnnouncedBlocks:
    """Stored-form headers, one after the other: 96 bytes each, where objects would take four times as much for as long
    as a slow client sends payloads. Immutable: any thread."""

    def __init__(self, data: bytes) -> None:
        """Raises `InvalidInputError` unless all of them are sound: without, nobody knows where a payload ends."""
        if len(data) % HEADER_BYTES:
            raise InvalidInputError(f"headers of {len(data)} bytes: need a multiple of {HEADER_BYTES}")
        self._data = data
        headers = np.frombuffer(data, HEADER_DTYPE)
        try:
            for place in np.flatnonzero(~well_formed(headers) | (headers["codec"] != Codec.RAW) | sealed(headers)):
                self.header(int(place))
        except CorruptBlockError as error:
            raise InvalidInputError(f"a block's header: {error}") from error
        self.sizes: list[int] = headers["stored_length"].tolist()
        """Payload bytes of each block."""

    def header(self, place: int) -> Header:
        """The header at this place."""
        return parse_header(self._data[place * HEADER_BYTES : (place + 1) * HEADER_BYTES])

    def headers(self, start: int, stop: int) -> list[Header]:
        """The headers from one place to another."""
        return [self.header(place) for place in range(start, stop)]

    def key(self, place: int) -> StoreKey:
        """The key of the block at this place."""
        at = place * HEADER_BYTES + _KEY
        return StoreKey(self._data[at : at + STORE_KEY_BYTES])

    def namespaces(self) -> set[bytes]:
        """The namespaces of all blocks."""
        starts = range(_NAMESPACE, len(self._data), HEADER_BYTES)
        return {self._data[at : at + NAMESPACE_ID_BYTES] for at in starts}
