"""Authentication: bearer tokens and names of client certificates to tenants, operators and observers."""

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvtier.clock import WALL, Clock
from kvtier.config.credentials import AcceptedToken, Role, token_id
from kvtier.errors import UnauthenticatedError
from kvtier.identity.keys import TenantId, tenant_id

MIN_TOKEN_BYTES, MAX_TOKEN_BYTES = 16, 1024
_SCHEME = "bearer "
_Metadata = Iterable[tuple[str, str | bytes]]
_NOBODY: frozenset[str] = frozenset()


class LoginRefusedError(UnauthenticatedError):
    """The credentials are not accepted here. `reason` is a word for metrics, `token` the id of what was sent."""

    def __init__(self, reason: str, message: str, token: str | None = None, name: str | None = None) -> None:
        """:param name: of who had the token, where that is known."""
        super().__init__(message)
        self.reason = reason
        self.token = token
        self.name = name


@dataclass(frozen=True, slots=True)
class Login:
    """A peer that was let in: its role, its name, and by what it has shown them."""

    role: Role
    name: str
    digest: str | None
    """Hex SHA-256 of its token; None where it has a certificate alone."""
    certificate_name: str | None
    """The name in its certificate that counted; None where it has a token alone."""

    @property
    def tenant(self) -> TenantId:
        """The tenant that it acts for; only where its role is that of a tenant."""
        return tenant_id(self.name)

    @property
    def token(self) -> str | None:
        """The id of its token."""
        return None if self.digest is None else token_id(self.digest)


@dataclass(frozen=True, slots=True)
class _Known:
    """All credentials at one time."""

    tokens: tuple[tuple[bytes, AcceptedToken], ...]
    by_digest: Mapping[str, AcceptedToken]
    certificates: Mapping[str, str]


class Authenticator:
    """Knows peers by the SHA-256 of their tokens, and tenants by names in their certificates. Any thread.

    A client shows a token, or a certificate with a name of a tenant, or both; both must be the same tenant's.
    """

    def __init__(
        self,
        tokens: Iterable[AcceptedToken],
        certificate_names: Mapping[str, str] | None = None,
        clock: Clock = WALL,
    ) -> None:
        """
        :param certificate_names: DNS name or URI of a client certificate -> tenant name. Compared as they are.
        :param clock: by which tokens expire, in seconds since 1970.
        """
        self._clock = clock
        self._known = _known(tokens, certificate_names or {})
        """Replaced as a whole."""

    def accept(
        self, tokens: Iterable[AcceptedToken], certificate_names: Mapping[str, str]
    ) -> tuple[list[str], list[str]]:
        """These credentials are accepted from now on, and no others; which ones are new, and which are gone, in
        words."""
        before, self._known = _described(self._known), _known(tokens, certificate_names)
        now = _described(self._known)
        return sorted(now - before), sorted(before - now)

    def is_current(self, login: Login) -> bool:
        """Whether what the peer has shown would still be accepted. About 0.5 us."""
        known = self._known
        if login.digest is not None:
            token = known.by_digest.get(login.digest)
            if token is None or (token.role, token.name) != (login.role, login.name) or self._is_over(token):
                return False
        return login.certificate_name is None or known.certificates.get(login.certificate_name) == login.name

    def authenticate(self, metadata: _Metadata, certificate_names: frozenset[str] = _NOBODY) -> Login:
        """The tenant of a gRPC call with this metadata.

        Raises `LoginRefusedError` as `tenant` does, and when there is more than one token.
        """
        values = [value for key, value in metadata if key == "authorization"]
        if not values and certificate_names:
            return self.tenant(None, certificate_names)
        if len(values) != 1 or not isinstance(values[0], str):
            raise LoginRefusedError("no_credentials", "send one metadata entry `authorization: Bearer TOKEN`")
        return self.tenant(bearer_token(values[0]), certificate_names)

    def tenant(self, token: str | None, certificate_names: frozenset[str] = _NOBODY) -> Login:
        """Gives the tenant of a bearer token, of a certificate, or of both. Raises `LoginRefusedError` as `log_in`
        does, and for operators and observers, who have no blocks."""
        login = self.log_in(token, certificate_names)
        if login.role is not Role.TENANT:
            raise LoginRefusedError(
                "role",
                f"the token is an {login.role}'s, who has no blocks: engines need a tenant's, and /tenants of the HTTP "
                "port is for this one",
                login.token,
                login.name,
            )
        return login

    def log_in(self, token: str | None, certificate_names: frozenset[str] = _NOBODY) -> Login:
        """Gives the tenant, operator or observer who has these credentials.

        Raises `LoginRefusedError` without telling which part of a token was wrong.

        :param certificate_names: of a certificate that was verified.
        """
        known = self._known
        named = {known.certificates[name]: name for name in sorted(certificate_names) if name in known.certificates}
        accepted = self._accepted(known, token) if token is not None else None
        owners = {(Role.TENANT, name) for name in named}
        if accepted is not None:
            owners.add((accepted.role, accepted.name))
        digest = accepted.digest if accepted is not None else None
        if not owners:
            raise LoginRefusedError("no_credentials", _stranger(certificate_names))
        if len(owners) > 1:
            raise LoginRefusedError(
                "conflict",
                "the credentials are of more than one tenant: the names in the certificate and the token must be one's",
                token_id(digest) if digest is not None else None,
            )
        ((role, name),) = owners
        return Login(role, name, digest, named.get(name) if role is Role.TENANT else None)

    def _accepted(self, known: _Known, text: str) -> AcceptedToken:
        """The time taken does not depend on how much of a token is right: all digests are compared, each in constant
        time."""
        token = text.encode()
        if len(token) < MIN_TOKEN_BYTES:  # whether it is known or not: a digest does not tell how long its token is
            raise LoginRefusedError(
                "short_token",
                f"the bearer token is shorter than {MIN_TOKEN_BYTES} bytes, which can be guessed; make one with: "
                "openssl rand -hex 32",
            )
        if len(token) > MAX_TOKEN_BYTES:
            raise LoginRefusedError("long_token", f"the bearer token is longer than {MAX_TOKEN_BYTES} bytes")
        digest = hashlib.sha256(token)
        found: AcceptedToken | None = None
        for raw, accepted in known.tokens:
            if hmac.compare_digest(raw, digest.digest()):
                found = accepted
        if found is None:
            raise LoginRefusedError(
                "unknown_token", "the bearer token is not known to this pool", token_id(digest.hexdigest())
            )
        if self._is_over(found):
            raise LoginRefusedError(
                "expired_token",
                f"the bearer token {found.id} of {found.role} {found.name!r} has expired: have another one made, e.g. "
                f"by `kvtier tenants rotate {found.name}`",
                found.id,
                found.name,
            )
        return found

    def _is_over(self, token: AcceptedToken) -> bool:
        return token.expires_at_s is not None and self._clock() >= token.expires_at_s


def bearer_token(authorization: str) -> str:
    """The token in the value of an `authorization` header. Raises `LoginRefusedError` where it has another form."""
    if authorization[: len(_SCHEME)].lower() != _SCHEME:
        raise LoginRefusedError("no_credentials", "send one header `authorization: Bearer TOKEN`")
    return authorization[len(_SCHEME) :]


def _known(tokens: Iterable[AcceptedToken], certificate_names: Mapping[str, str]) -> _Known:
    accepted = list(tokens)
    return _Known(
        tuple((bytes.fromhex(token.digest), token) for token in accepted),
        {token.digest: token for token in accepted},
        dict(certificate_names),
    )


def _described(known: _Known) -> set[str]:
    tokens = {f"{token.role} {token.name}: token {token.id}" for _, token in known.tokens}
    return tokens | {f"tenant {name}: certificate {text[:100]}" for text, name in known.certificates.items()}


def _stranger(certificate_names: frozenset[str]) -> str:
    if not certificate_names:
        return "no credentials: send a bearer token, or show a certificate that a tenant's certificate_names know"
    names = ", ".join(sorted(certificate_names))[:500]
    return f"no bearer token, and no tenant's certificate_names have any of the certificate's: {names}"
