"""What `kvtier config check`, and a service at its start, say of certificates that do not hold, or soon will not."""

import contextlib
import datetime
from collections.abc import Iterable
from pathlib import Path

from kvtier.config.config import Config
from kvtier.config.findings import Finding, Severity
from kvtier.errors import ConfigError
from kvtier.net.certificates import validity_of

_SOON = datetime.timedelta(days=14)


def ending_certificates(config: Config, table: str, names: Iterable[str]) -> Iterable[Finding]:
    """Yields a warning for each certificate that nobody takes any more or yet, or that ends within two weeks.

    :param names: keys of the table that name files. One that cannot be read is for whoever loads it to tell.
    """
    for name in names:
        path = getattr(getattr(config, table), name)
        if path is not None:
            with contextlib.suppress(ConfigError):
                yield from ending_certificate(f"{table}.{name}", config.references.path(path))


def ending_certificate(key: str, path: Path) -> Iterable[Finding]:
    """Yields a warning where the certificate in one file has ended, soon will, or has not begun.

    Raises `ConfigError` when the file cannot be read.

    :param key: that names it, with dots.
    """
    validity, now = validity_of((key, path)), datetime.datetime.now(datetime.UTC)
    if validity is None:
        return
    begin, end = validity
    if now < begin:
        text = f"the certificate {path} holds from {day_of(begin)} on, and no TLS connection is made with it before"
        remedy = "set this machine's clock, or have another one made (docs/tls.md)"
        yield Finding(Severity.WARNING, key, f"{text}: {remedy}", defeats=True)
    elif end <= now:
        text = f"the certificate {path} expired at {day_of(end)}, and no TLS connection is made with it"
        remedy = "renew it (docs/tls.md); a service reads the new files with the next connection"
        yield Finding(Severity.WARNING, key, f"{text}: {remedy}", defeats=True)
    elif end <= now + _SOON:
        text = f"the certificate {path} expires at {day_of(end)}; renew it before (docs/tls.md)"
        yield Finding(Severity.WARNING, key, text)


def day_of(end: datetime.datetime) -> str:
    """The beginning or the end of a certificate, for people."""
    return end.strftime("%Y-%m-%d %H:%M UTC")
