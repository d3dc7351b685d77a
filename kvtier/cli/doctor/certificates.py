"""Reads until when certificates hold. The standard library does not tell it: a few bytes of DER are read here."""

import datetime
import re
import ssl
import time
from collections.abc import Iterable
from pathlib import Path

from kvtier.cli.doctor.lines import Level, Line
from kvtier.net.certificates import read_pem

_DAY_S = 86_400
_SOON_S = 14 * _DAY_S
_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_UTC_TIME, _VERSION = 0x17, 0xA0


def certificate_lines(key: str, path: Path) -> Iterable[Line]:
    """Says when the first certificate of a file ends. Raises `ConfigError` when the file cannot be read.

    :param key: that names it, with dots.
    """
    found = _PEM.search(read_pem(path).decode(errors="replace"))
    if found is None:
        return
    try:
        end_s = ends_at_s(ssl.PEM_cert_to_DER_cert(found[0]))
    except (ValueError, IndexError):  # what it is then, who loads it says
        return
    day = datetime.datetime.fromtimestamp(end_s, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    left_s = end_s - time.time()
    if left_s <= 0:
        yield Line(
            Level.PROBLEM,
            key,
            f"the certificate {path} expired at {day}",
            "the other side refuses it, and no TLS connection is made",
            "renew it (docs/tls.md); a pool reads the new files with the next connection",
        )
    elif left_s < _SOON_S:
        yield Line(
            Level.WARNING, key, f"the certificate {path} expires at {day}", remedy="renew it before (docs/tls.md)"
        )
    else:
        yield Line(Level.OK, key, f"the certificate {path} holds until {day}")


def ends_at_s(certificate: bytes) -> float:
    """Returns when a certificate in DER ends, in seconds since 1970. Raises `ValueError` or `IndexError` for others."""
    _, inside, _ = _element(certificate, 0)
    _, signed, _ = _element(inside, 0)
    tag, _, at = _element(signed, 0)
    if tag == _VERSION:
        _, _, at = _element(signed, at)  # the serial number is behind the version
    for _ in ("signature", "issuer"):
        _, _, at = _element(signed, at)
    _, validity, _ = _element(signed, at)
    _, _, at = _element(validity, 0)
    tag, text, _ = _element(validity, at)
    form = "%y%m%d%H%M%SZ" if tag == _UTC_TIME else "%Y%m%d%H%M%SZ"
    return datetime.datetime.strptime(text.decode(), form).replace(tzinfo=datetime.UTC).timestamp()


def _element(data: bytes, at: int) -> tuple[int, bytes, int]:
    """Returns tag and content of the element at a place of DER, and the place behind it."""
    tag, length, start = data[at], data[at + 1], at + 2
    if length & 0x80:
        count = length & 0x7F
        length, start = int.from_bytes(data[start : start + count]), start + count
    return tag, data[start : start + length], start + length
