"""Why an engine does not answer the gateway, in words that say what to do."""

import socket
import ssl
from contextlib import suppress
from urllib.error import HTTPError
from urllib.parse import urlsplit

from kvtier.net.tls_errors import Trust, distrust, is_of_no_tls

_TIMEOUT_S = 3.0
_START = "start it, wait until it is up, or correct the URL"
_NAME_REMEDY = "write its URL with a name that the certificate is for, or give the engine one for this name"
_OF_FILE = Trust(
    "the engine's certificate",
    "no CA in gateway.engine_tls_ca",
    "is gateway.engine_tls_ca the right file?",
    _NAME_REMEDY,
)
_OF_SYSTEM = Trust(
    "the engine's certificate",
    "no CA of this system",
    "set gateway.engine_tls_ca to the CA that has",
    _NAME_REMEDY,
)


def explained(url: str, error: Exception, *, has_ca: bool) -> tuple[str, str]:
    """What was found, and what to do. May connect once more, for some seconds at the most.

    :param url: of the engine, as it was asked.
    :param has_ca: whether `gateway.engine_tls_ca` is set.
    """
    reason, address = getattr(error, "reason", error), urlsplit(url)
    host, port = str(address.hostname), int(address.port or 0)
    if isinstance(reason, ssl.SSLCertVerificationError):
        return distrust(reason, host, _OF_FILE if has_ca else _OF_SYSTEM)
    if isinstance(reason, ssl.SSLError) and is_of_no_tls(reason):
        return "it speaks no TLS", f"write http://{address.netloc}, or give the engine a certificate"
    if isinstance(reason, ssl.SSLError) and "CERTIFICATE_REQUIRED" in str(reason.reason):
        return "it asks for a certificate, and a gateway shows none", "let it take connections without one"
    if isinstance(reason, TimeoutError):
        return f"it does not answer: {reason}", "if it is up, it hangs: see its log. Look for a firewall, too"
    if address.scheme == "http" and not isinstance(reason, ConnectionRefusedError) and _speaks_tls(host, port):
        return "it speaks TLS", f"write https://{address.netloc}"
    if isinstance(error, HTTPError):
        return f"it answers {error.code} {error.reason}", "wait until it is up; see its log"
    return f"it does not answer: {reason}", _START


def _speaks_tls(host: str, port: int) -> bool:
    """Shakes hands with whoever it is; nothing is sent."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with suppress(OSError), socket.create_connection((host, port), _TIMEOUT_S) as connection:
        context.wrap_socket(connection).close()
        return True
    return False
