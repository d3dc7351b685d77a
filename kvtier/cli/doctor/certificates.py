"""Says until when certificates hold. What has ended, or soon will, is a finding of the configuration."""

from collections.abc import Iterable
from pathlib import Path

from kvtier.cli.doctor.lines import Level, Line
from kvtier.config.certificate_findings import day_of, ending_certificate
from kvtier.net.certificates import validity_of


def certificate_lines(key: str, path: Path) -> Iterable[Line]:
    """Says when the certificate of a file ends, or the last of its CAs, if that is not soon. Raises `ConfigError` when
    the file cannot be read.

    :param key: that names it, with dots.
    """
    validity = validity_of((key, path))
    if validity is not None and not list(ending_certificate(key, path)):
        yield Line(Level.OK, key, f"the certificate {path} holds until {day_of(validity[1])}")
