"""Certificates and keys in PEM files: checked when they are read, and read again when they were renewed."""

import datetime
import logging
import os
import ssl
import stat
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NoReturn, TypeVar

from kvtier.errors import ConfigError
from kvtier.net.certificate_validity import validity_of_certificate
from kvtier.system.quiet_log import QuietLog

_log = logging.getLogger(__name__)
_Stamp = tuple[tuple[int, int, int], ...]
"""Inode, size and time of change of each file."""
_T = TypeVar("_T")
_NOT_FOR_SERVERS = 26
"""X509_V_ERR_INVALID_PURPOSE."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """The files of one end. Servers have a certificate; clients have a CA, and a certificate for mutual TLS."""

    certificate: Path | None = None
    """Own certificate, then those of intermediate CAs."""
    key: Path | None = None
    """The private key of `certificate`, not encrypted."""
    ca: Path | None = None
    """CAs that sign peers' certificates. A server that has it takes no client without such a certificate."""

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            given, missing = ("tls_certificate", "tls_key") if self.certificate else ("tls_key", "tls_certificate")
            raise ConfigError(f"{given} without {missing}: TLS needs a certificate and its key, set both or neither")

    @property
    def paths(self) -> list[Path]:
        return [path for path in (self.certificate, self.key, self.ca) if path is not None]


class Renewed(Generic[_T]):
    """What is made of files, made anew when one of them has changed. Any thread.

    Looking costs a `stat` per file. What was made last stays in use while the files cannot be used, e.g. when a
    certificate has been replaced and its key not yet.
    """

    def __init__(self, paths: Sequence[Path], make: Callable[[], _T]) -> None:
        """:param make: raises `ConfigError` when the files are no good."""
        self._paths = paths
        self._make = make
        self._warn = QuietLog(_log)
        self._lock = threading.Lock()
        """Held while `make` runs: everybody else needs the same."""
        self._made: tuple[_Stamp, _T] | None = None
        """Guarded by _lock."""

    def current(self) -> _T:
        """Raises `ConfigError` when there is none yet and the files are no good."""
        with self._lock:
            try:
                stamp = tuple(map(_stamp, self._paths))  # before reading: a change meanwhile is seen next time
                if self._made is None or self._made[0] != stamp:
                    made = self._make()
                    if self._made is not None:
                        _require_validity(self._paths)
                    self._made = (stamp, made)
            except ConfigError as error:
                if self._made is None:
                    raise
                self._warn.warning(f"the certificates from before stay in use: {error}")
            return self._made[1]


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """Makes the context of accepted connections; with `files.ca` only clients whose certificate holds are let in."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, files)
    if files.certificate is not None:
        _require_use_by_servers(context, files.certificate)
    context.num_tickets = 0  # a client that never reads would have them reset its connection
    if files.ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """Makes the context of connections to servers whose certificate `files.ca` has signed, for the name in use."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, files)


def read_pem(path: Path) -> bytes:
    """Raises `ConfigError` when it is no file, or cannot be read."""
    _stat(path)
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error


def _context(protocol: int, files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET
    context.hostname_checks_common_name = False
    for path in files.paths:
        read_pem(path)  # what `ssl` raises does not name the file
    if files.certificate is not None and files.key is not None:
        _load_pair(context, files.certificate, files.key)
    if files.ca is not None:
        try:
            context.load_verify_locations(files.ca)
        except OSError as error:  # of which ssl.SSLError is one
            raise ConfigError(f"tls: {files.ca} holds no CA certificate in PEM: {error}") from error
    return context


def _load_pair(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    def refuse() -> NoReturn:  # instead of asking whoever sits at the terminal
        raise ConfigError(f"tls: the key {key} is encrypted; store it without: openssl pkey -in {key} -out NEW")

    try:
        context.load_cert_chain(certificate, key, refuse)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"tls: the key {key} is not that of {certificate}; were both renewed?") from error
        raise ConfigError(f"tls: {certificate} or {key} is not PEM with a certificate and its key: {error}") from error
    except OSError as error:
        raise _unreadable(certificate, error) from error


def _require_use_by_servers(context: ssl.SSLContext, certificate: Path) -> None:
    """Raises `ConfigError` when the certificate says what it is for, and that is no server: every client refuses it.

    `ssl` reads no such field by itself: a client in memory, which trusts this very certificate, is shown it.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(certificate)
    asking, answering = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = client.wrap_bio(answering, asking), context.wrap_bio(asking, answering, server_side=True)
    for side in (*sides, sides[0]):  # hello, certificate, and what the client thinks of it
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as error:
            if error.verify_code == _NOT_FOR_SERVERS:
                raise ConfigError(
                    f"tls: {certificate} is not for servers: its extendedKeyUsage lacks serverAuth, and every client "
                    "refuses it; issue it with serverAuth, or without that field (docs/tls.md)"
                ) from error
            return  # e.g. it has expired, which is told elsewhere, and may be mended while the pool runs
        except ssl.SSLError:
            return


def _require_validity(paths: Iterable[Path]) -> None:
    """Raises `ConfigError` for a certificate that has ended: nobody who renews one means that."""
    for path in paths:
        validity = validity_of_certificate(read_pem(path))
        if validity is not None and validity[1] <= datetime.datetime.now(datetime.UTC):
            raise ConfigError(f"tls: {path} expired at {validity[1]:%Y-%m-%d %H:%M} UTC; renew it (docs/tls.md)")


def _stamp(path: Path) -> tuple[int, int, int]:
    found = _stat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns


def _stat(path: Path) -> os.stat_result:
    try:
        found = os.stat(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    if not stat.S_ISREG(found.st_mode):  # reading a FIFO would wait for a writer, for ever
        raise ConfigError(f"tls: {path} is no file: name a PEM file")
    return found


def _unreadable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"tls: cannot read {path}: {error.strerror or error}")
