"""Authentication: bearer tokens and names of client certificates to tenants."""

import hashlib
import hmac
from collections.abc import Iterable, Mapping

from kvtier.errors import UnauthenticatedError
from kvtier.identity.keys import TenantId, tenant_id

MIN_TOKEN_BYTES, MAX_TOKEN_BYTES = 16, 1024
_SCHEME = "bearer "
_Metadata = Iterable[tuple[str, str | bytes]]
_NOBODY: frozenset[str] = frozenset()


class Authenticator:
    """Knows tenants by the SHA-256 of their tokens, and by names in their certificates. Immutable: any thread.

    A client shows a token, or a certificate with a name of a tenant, or both; both must be the same tenant's.
    """

    def __init__(self, tenants: Mapping[str, str], certificate_names: Mapping[str, str] | None = None) -> None:
        """
        :param tenants: hex SHA-256 of a token -> tenant name.
        :param certificate_names: DNS name or URI of a client certificate -> tenant name. Compared as they are.
        """
        self._tenants = tuple((bytes.fromhex(digest), tenant_id(name)) for digest, name in tenants.items())
        self._names = {name: tenant_id(tenant) for name, tenant in (certificate_names or {}).items()}

    def authenticate(self, metadata: _Metadata, certificate_names: frozenset[str] = _NOBODY) -> TenantId:
        """The tenant of a gRPC call with this metadata.

        Raises `UnauthenticatedError` as `tenant_of` does, and when there is more than one token.
        """
        values = [value for key, value in metadata if key == "authorization"]
        if not values and certificate_names:
            return self.tenant_of(None, certificate_names)
        if len(values) != 1 or not isinstance(values[0], str) or values[0][: len(_SCHEME)].lower() != _SCHEME:
            raise UnauthenticatedError("send one metadata entry `authorization: Bearer TOKEN`")
        return self.tenant_of(values[0][len(_SCHEME) :], certificate_names)

    def tenant_of(self, token: str | None, certificate_names: frozenset[str] = _NOBODY) -> TenantId:
        """The tenant of a bearer token, of a certificate, or of both.

        Raises `UnauthenticatedError` without telling which part of a token was wrong.

        :param certificate_names: of a certificate that was verified.
        """
        found = {self._names[name] for name in certificate_names if name in self._names}
        if token is not None:
            found.add(self._tenant_of_token(token))
        if not found:
            raise UnauthenticatedError(_stranger(certificate_names))
        if len(found) > 1:
            raise UnauthenticatedError(
                "the credentials are of more than one tenant: the names in the certificate and the token must be one's"
            )
        return found.pop()

    def _tenant_of_token(self, text: str) -> TenantId:
        """The time taken does not depend on how much of a token is right: all digests are compared, each in constant
        time."""
        token = text.encode()
        if len(token) < MIN_TOKEN_BYTES:  # whether it is known or not: a digest does not tell how long its token is
            raise UnauthenticatedError(
                f"the bearer token is shorter than {MIN_TOKEN_BYTES} bytes, which can be guessed; make one with: "
                "openssl rand -hex 32"
            )
        if len(token) > MAX_TOKEN_BYTES:
            raise UnauthenticatedError(f"the bearer token is longer than {MAX_TOKEN_BYTES} bytes")
        digest = hashlib.sha256(token).digest()
        found: TenantId | None = None
        for known, tenant in self._tenants:
            if hmac.compare_digest(known, digest):
                found = tenant
        if found is None:
            raise UnauthenticatedError("the bearer token is not known to this pool")
        return found


def _stranger(certificate_names: frozenset[str]) -> str:
    if not certificate_names:
        return "no credentials: send a bearer token, or show a certificate that a tenant's certificate_names know"
    names = ", ".join(sorted(certificate_names))[:500]
    return f"no bearer token, and no tenant's certificate_names have any of the certificate's: {names}"
