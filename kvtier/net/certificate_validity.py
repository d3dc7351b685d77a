"""Reads when certificates hold. The standard library does not tell it: a few bytes of DER are read here."""

import datetime
import re
import ssl

_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_UTC_TIME, _VERSION = 0x17, 0xA0


Validity = tuple[datetime.datetime, datetime.datetime]
"""When a certificate begins and ends."""


def validity_of_certificate(pem: bytes) -> Validity | None:
    """Returns when the first certificate of a file's bytes holds: behind it are those that have signed it. None where
    there is none that can be read: whoever loads it says what it is then."""
    return next(iter(_validities(pem)), None)


def validity_of_cas(pem: bytes) -> Validity | None:
    """Returns when the CA holds that holds for longest, or else the last one: while CAs change, a file has the old one,
    too. None where there is none that can be read."""
    now, found = datetime.datetime.now(datetime.UTC), _validities(pem)
    return max(found, key=lambda each: (each[0] <= now < each[1], each[1]), default=None)


def _validities(pem: bytes) -> list[Validity]:
    try:
        return [_validity(ssl.PEM_cert_to_DER_cert(each)) for each in _PEM.findall(pem.decode(errors="replace"))]
    except (ValueError, IndexError):
        return []


def _validity(certificate: bytes) -> Validity:
    """Returns when a certificate in DER begins and ends. Raises `ValueError` or `IndexError` for others."""
    _, inside, _ = _element(certificate, 0)
    _, signed, _ = _element(inside, 0)
    tag, _, at = _element(signed, 0)
    if tag == _VERSION:
        _, _, at = _element(signed, at)  # the serial number is behind the version
    for _ in ("signature", "issuer"):
        _, _, at = _element(signed, at)
    _, validity, _ = _element(signed, at)
    begin, at = _time(validity, 0)
    end, _ = _time(validity, at)
    return begin, end


def _time(data: bytes, at: int) -> tuple[datetime.datetime, int]:
    """Returns the time at a place of DER, and the place behind it."""
    tag, text, after = _element(data, at)
    form = "%y%m%d%H%M%SZ" if tag == _UTC_TIME else "%Y%m%d%H%M%SZ"
    return datetime.datetime.strptime(text.decode(), form).replace(tzinfo=datetime.UTC), after


def _element(data: bytes, at: int) -> tuple[int, bytes, int]:
    """Returns tag and content of the element at a place of DER, and the place behind it."""
    tag, length, start = data[at], data[at + 1], at + 2
    if length & 0x80:
        count = length & 0x7F
        length, start = int.from_bytes(data[start : start + count]), start + count
    return tag, data[start : start + length], start + length
