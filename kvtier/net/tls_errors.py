"""What went wrong with TLS, in words that say what to change."""

import ssl
from dataclasses import dataclass

from kvtier.errors import UnauthenticatedError

_NO_TLS = {"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE"}
_NAMED_OTHERWISE = {62, 64}
"""X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH."""
_UNTRUSTED = {18, 19, 20, 21}
"""X509_V_ERR_*: self-signed, alone or in a chain; no issuer to be had; no way to verify the first."""
_REFUSED_CERTIFICATE = (
    "BAD_CERTIFICATE",
    "UNSUPPORTED_CERTIFICATE",
    "CERTIFICATE_REVOKED",
    "CERTIFICATE_EXPIRED",
    "CERTIFICATE_UNKNOWN",
    "UNKNOWN_CA",
    "ACCESS_DENIED",
    "CERTIFICATE_REQUIRED",
)
"""How alerts about the receiver's own certificate end."""


@dataclass(frozen=True, slots=True)
class Trust:
    """What a client trusts, and what to do about what it does not, in words of its configuration."""

    certificate: str
    """The server's, as `the pool's certificate`."""
    cas: str
    """None of what the client trusts, as `no CA in tls_ca`."""
    cas_remedy: str
    name_remedy: str


_POOL = Trust(
    "the pool's certificate",
    "no CA in tls_ca",
    "is it the right file?",
    "use an address that it is for, or set tls_server_name in [pool]",
)


class TlsError(OSError):
    """The two ends cannot agree on TLS; the message says what to change."""


def explained(error: ssl.SSLError, connection: ssl.SSLSocket | ssl.SSLObject) -> TlsError | UnauthenticatedError:
    """What to raise for an error of the handshake, or of a record, at this end of the connection."""
    return _refused(error) if connection.server_side else _failed(error, str(connection.server_hostname))


def _refused(error: ssl.SSLError) -> TlsError:
    """What a server says of a handshake that failed."""
    reason = error.reason or str(error)
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return TlsError("a client without a certificate, which tls_client_ca asks for")
    if isinstance(error, ssl.SSLCertVerificationError):
        return TlsError(f"a client whose certificate does not hold: {error.verify_message}")
    if "_ALERT_" in reason and reason.endswith(_REFUSED_CERTIFICATE):
        return TlsError(f"a client that does not accept this side's certificate: {reason}")
    return TlsError(f"TLS failed: {reason}")


def _failed(error: ssl.SSLError, name: str) -> TlsError | UnauthenticatedError:
    """What a client says of TLS that failed, and what to do about it."""
    reason = error.reason or str(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        return TlsError(": ".join(distrust(error, name, _POOL)))
    if "_ALERT_" in reason and reason.endswith(_REFUSED_CERTIFICATE):
        why = reason.partition("_ALERT_")[2].lower().replace("_", " ")
        return UnauthenticatedError(
            f"the pool refuses this engine's certificate ({why}): give [pool] a tls_certificate and tls_key that are "
            "valid and signed by a CA in the pool's tls_client_ca"
        )
    if is_of_no_tls(error):
        return TlsError(
            "no TLS is spoken there: give the pool tls_certificate and tls_key, or take tls_ca out of [pool]"
        )
    if reason.endswith("_ALERT_INTERNAL_ERROR"):
        return TlsError("the pool takes no more connections; see its max_connections and its log")
    if reason.endswith("_ALERT_PROTOCOL_VERSION"):
        return TlsError("no version of TLS in common: 1.2 or later is needed")
    if reason.endswith("_ALERT_HANDSHAKE_FAILURE"):
        return TlsError("the pool refused the handshake: no cipher in common, or it asks for a client certificate")
    return TlsError(f"TLS failed: {reason}")


def distrust(error: ssl.SSLCertVerificationError, name: str, trust: Trust) -> tuple[str, str]:
    """Why a client takes no certificate, and what to do.

    :param name: of the server, as the client has it.
    """
    if error.verify_code in _NAMED_OTHERWISE:
        return f"{trust.certificate} is not for {name!r} ({error.verify_message})", trust.name_remedy
    if error.verify_code in _UNTRUSTED:
        return f"{trust.cas} has signed {trust.certificate} ({error.verify_message})", trust.cas_remedy
    return f"{trust.certificate} does not hold ({error.verify_message})", "renew it, or check this machine's clock"


def is_of_no_tls(error: ssl.SSLError) -> bool:
    """Whether the other end does not speak TLS."""
    return error.reason in _NO_TLS
