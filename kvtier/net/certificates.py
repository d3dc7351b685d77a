"""Certificates and keys in PEM files: checked when they are read, and read again when they were renewed."""

import datetime
import logging
import os
import ssl
import stat
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, NoReturn, TypeVar

from kvtier.errors import ConfigError
from kvtier.net.certificate_validity import Validity, validity_of_cas, validity_of_certificate
from kvtier.system.quiet_log import QuietLog

_log = logging.getLogger(__name__)
_Stamp = tuple[tuple[int, int, int] | None, ...]
"""Inode, size and time of change of each file; None of one that is not there."""
NamedFile = tuple[str, Path]
"""What errors call a file, and where it is."""
_T = TypeVar("_T")
_NEVER = datetime.datetime.max.replace(tzinfo=datetime.UTC)
_NOT_FOR_THIS = 26
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
    names: tuple[str, str, str] = field(default=("tls_certificate", "tls_key", "tls_ca"), compare=False)
    """What errors call the three, in the order of the fields."""

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            given, missing = self.names[:2] if self.certificate else self.names[1::-1]
            raise ConfigError(
                f"{given}: needs {missing.rpartition('.')[2]}, too: TLS has a certificate and its key, set both or "
                "neither"
            )

    @property
    def named(self) -> list[NamedFile]:
        """Names and paths of the files that there are."""
        paths = (self.certificate, self.key, self.ca)
        return [(name, path) for name, path in zip(self.names, paths, strict=True) if path is not None]


class Renewed(Generic[_T]):
    """What is made of files, made anew when one of them has changed. Any thread.

    Looking costs a `stat` per file. What was made last stays in use while the files cannot be used, e.g. when a
    certificate has been replaced and its key not yet.
    """

    def __init__(self, files: Sequence[NamedFile], make: Callable[[], _T]) -> None:
        """:param make: raises `ConfigError` when the files are no good."""
        self._files = files
        self._make = make
        self._problem, self._warn = "", QuietLog(_log)
        """What was wrong the last time, and the lines about it. Guarded by _lock."""
        self._lock = threading.Lock()
        """Held while `make` runs: everybody else needs the same."""
        self._made: tuple[_Stamp, _T] | None = None
        """Guarded by _lock."""

    def current(self) -> _T:
        """Raises `ConfigError` when there is none yet and the files are no good."""
        with self._lock:
            try:
                stamp = tuple(
                    _stamp(path) for _, path in self._files
                )  # before reading: a change meanwhile is seen next time
                if self._made is None or self._made[0] != stamp:
                    made = self._make()
                    if self._made is not None:
                        _require_validity(self._files)
                        _log.info(
                            "renewed certificates are in use: %s", ", ".join(str(path) for _, path in self._files)
                        )
                    self._made = (stamp, made)
            except ConfigError as error:
                if self._made is None:
                    raise
                self._log_about(error).warning(f"the certificates from before stay in use: {error}")
            return self._made[1]

    def _log_about(self, error: ConfigError) -> QuietLog:
        """One for each problem, so that none is held back because of another. Caller holds _lock."""
        if str(error) != self._problem:
            self._problem, self._warn = str(error), QuietLog(_log)
        return self._warn


def server_context(files: TlsFiles, kind: type[ssl.SSLContext] = ssl.SSLContext) -> ssl.SSLContext:
    """Makes the context of accepted connections; with `files.ca` only clients whose certificate holds are let in."""
    context = _context(kind(ssl.PROTOCOL_TLS_SERVER), files)
    _require_use(files, by_servers=True)
    context.num_tickets = 0  # a client that never reads would have them reset its connection
    if files.ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """Makes the context of connections to servers whose certificate `files.ca` has signed, for the name in use."""
    context = _context(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), files)
    _require_use(files, by_servers=False)
    return context


def read_pem(file: NamedFile) -> bytes:
    """Raises `ConfigError` when it is no file, or cannot be read."""
    name, path = file
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # reading a FIFO would wait for a writer, for ever
            raise ConfigError(f"{name}: {path} is no file: name a PEM file")
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}: cannot read {path}: {error.strerror or error}") from error


def _context(context: ssl.SSLContext, files: TlsFiles) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET
    context.hostname_checks_common_name = False
    for file in files.named:
        read_pem(file)  # what `ssl` raises does not name the file
    _load_pair(context, files)
    if files.ca is not None:
        try:
            context.load_verify_locations(files.ca)
        except OSError as error:  # of which ssl.SSLError is one
            raise ConfigError(f"{files.names[2]}: {files.ca} holds no CA certificate in PEM: {error}") from error
    return context


def _load_pair(context: ssl.SSLContext, files: TlsFiles) -> None:
    """Loads the certificate and its key, if there are any."""
    certificate, key = files.certificate, files.key
    if certificate is None or key is None:
        return
    of_certificate, of_key, _ = files.names

    def refuse() -> NoReturn:  # instead of asking whoever sits at the terminal
        raise ConfigError(f"{of_key}: {key} is encrypted; store it without: openssl pkey -in {key} -out NEW")

    try:
        context.load_cert_chain(certificate, key, refuse)
    except OSError as error:  # of which ssl.SSLError is one
        if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"{of_key}: {key} is not the key of {certificate}; were both renewed?") from error
        raise ConfigError(
            f"{of_certificate}: {certificate} or {key} is not PEM with a certificate and its key: {error}"
        ) from error


def _require_use(files: TlsFiles, *, by_servers: bool) -> None:
    """Raises `ConfigError` when the certificate says what it is for, and that is not this: every peer refuses it.

    `ssl` reads no such field by itself: a peer in memory, which trusts this very certificate, is shown it.
    """
    if files.certificate is None:
        return
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    for context in (server, client):
        _load_pair(context, files)
    judge = client if by_servers else server
    judge.verify_mode = ssl.CERT_REQUIRED
    judge.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    judge.load_verify_locations(files.certificate)
    asking, answering = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client.wrap_bio(answering, asking), server.wrap_bio(asking, answering, server_side=True)
    for end in (*ends, *ends):  # each says hello, shows its certificate, and hears what the other one thinks of it
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as error:
            if error.verify_code == _NOT_FOR_THIS:
                who, use, peers = (
                    ("servers", "serverAuth", "client") if by_servers else ("clients", "clientAuth", "server")
                )
                raise ConfigError(
                    f"{files.names[0]}: {files.certificate} is not for {who}: its extendedKeyUsage lacks {use}, and "
                    f"every {peers} refuses it; issue it with {use}, or without that field (docs/tls.md)"
                ) from error
            return  # e.g. it has expired, which is told elsewhere, and may be mended while the service runs
        except ssl.SSLError:
            return


def validity_of(file: NamedFile) -> Validity | None:
    """When the certificate of a file holds, or the CAs of one whose name ends with `ca`; None where there is none.
    Raises `ConfigError` when it cannot be read."""
    name, _ = file
    return (validity_of_cas if name.endswith("_ca") else validity_of_certificate)(read_pem(file))


def _require_validity(files: Iterable[NamedFile]) -> None:
    """Raises `ConfigError` for a certificate that has ended or not begun: nobody who renews one means that."""
    now = datetime.datetime.now(datetime.UTC)
    for name, path in files:
        begin, end = validity_of((name, path)) or (now, _NEVER)
        if end <= now:
            raise ConfigError(f"{name}: {path} expired at {end:%Y-%m-%d %H:%M} UTC; renew it (docs/tls.md)")
        if begin > now:
            raise ConfigError(
                f"{name}: {path} holds from {begin:%Y-%m-%d %H:%M} UTC on; set this machine's clock, or have another "
                "one made (docs/tls.md)"
            )


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:  # whoever reads it says why
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
