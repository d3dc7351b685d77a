"""Who is calling: bearer tokens to tenants."""

import hashlib
import hmac
from collections.abc import Iterable, Mapping

from kvtier.errors import UnauthenticatedError
from kvtier.keys import TenantId, tenant_id

MAX_TOKEN_BYTES = 1024
_SCHEME = "bearer "


class TokenAuthenticator:
    """Knows tenants by the SHA-256 of their tokens. Immutable, so any thread may use it."""

    def __init__(self, tenants: Mapping[str, str]) -> None:
        """:param tenants: hex SHA-256 of a token -> tenant name."""
        self._tenants = tuple((bytes.fromhex(digest), tenant_id(name)) for digest, name in tenants.items())

    def authenticate(self, metadata: Iterable[tuple[str, str | bytes]]) -> TenantId:
        """The tenant of a call with this metadata.

        Raises `UnauthenticatedError` as `tenant_of` does, and when there is not exactly one token.
        """
        values = [value for key, value in metadata if key == "authorization"]
        if len(values) != 1 or not isinstance(values[0], str) or values[0][: len(_SCHEME)].lower() != _SCHEME:
            raise UnauthenticatedError("send one metadata entry `authorization: Bearer TOKEN`")
        return self.tenant_of(values[0][len(_SCHEME) :])

    def tenant_of(self, text: str) -> TenantId:
        """The tenant of a bearer token.

        Raises `UnauthenticatedError` without telling which part was wrong. The time taken does not
        depend on how much of a token is right: digests are compared, each in constant time, all of them.
        """
        token = text.encode()
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
