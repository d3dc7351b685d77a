"""Names in a certificate, read from its DER: those that gRPC hands out end at the first NUL byte in them."""

import ssl
from collections.abc import Iterator

_EXTENSIONS = 0xA3
_SUBJECT_ALT_NAME = b"\x55\x1d\x11"
_DNS, _URI = 0x82, 0x86


def names_in(pem: str) -> frozenset[str]:
    """DNS names and URIs of a certificate that was verified; none of one that cannot be read."""
    try:
        return frozenset(_names(ssl.PEM_cert_to_DER_cert(pem)))
    except (ValueError, IndexError):
        return frozenset()


def _names(der: bytes) -> Iterator[str]:
    to_be_signed = _first(_first(der))
    for tag, field in _elements(to_be_signed):
        if tag != _EXTENSIONS:
            continue
        for _, extension in _elements(_first(field)):
            (_, kind), *_, (_, value) = _elements(extension)
            if kind == _SUBJECT_ALT_NAME:
                yield from (name.decode() for tag, name in _elements(_first(value)) if tag in (_DNS, _URI))


def _first(der: bytes) -> bytes:
    return next(_elements(der), (0, b""))[1]


def _elements(der: bytes) -> Iterator[tuple[int, bytes]]:
    """Tag and content of each element."""
    at = 0
    while at < len(der):
        tag, length, at = der[at], der[at + 1], at + 2
        if length & 0x80:
            num_bytes = length & 0x7F
            length, at = int.from_bytes(der[at : at + num_bytes], "big"), at + num_bytes
        yield tag, der[at : at + length]
        at += length
