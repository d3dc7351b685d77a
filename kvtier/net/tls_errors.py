"""What went wrong with TLS, in words that say what to change."""

import ssl

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
        return TlsError(_distrust(error, name))
    if "_ALERT_" in reason and reason.endswith(_REFUSED_CERTIFICATE):
        why = reason.partition("_ALERT_")[2].lower().replace("_", " ")
        return UnauthenticatedError(
            f"the pool refuses this engine's certificate ({why}): give [pool] a tls_certificate and tls_key that are "
            "valid and signed by a CA in the pool's tls_client_ca"
        )
    if reason in _NO_TLS:
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


def _distrust(error: ssl.SSLCertVerificationError, name: str) -> str:
    if error.verify_code in _NAMED_OTHERWISE:
        return (
            f"the pool's certificate is not for {name!r}: use an address that it is for, or set tls_server_name in "
            f"[pool] ({error.verify_message})"
        )
    if error.verify_code in _UNTRUSTED:
        return f"no CA in tls_ca has signed the pool's certificate ({error.verify_message}); is it the right file?"
    return f"the pool's certificate does not hold ({error.verify_message}): renew it, or check this machine's clock"
