"""Tokens of tenants, operators and observers: how they are configured, and what a pool accepts."""

import hashlib
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, AwareDatetime, BeforeValidator, Field

from kvtier.config.fields import Section

_ID_DIGITS = 8
_DIGESTS_OF_NOTHING = frozenset(hashlib.sha256(nothing).hexdigest() for nothing in (b"", b"\n"))
"""What a recipe makes of a token that it failed to make."""


class Role(StrEnum):
    """What a peer of the pool may do. A tenant has blocks of its own, and sees its own figures."""

    TENANT = "tenant"
    OPERATOR = "operator"
    """Administers all tenants, and has no blocks."""
    OBSERVER = "observer"
    """Sees what all tenants have together, and has no blocks."""
    CLIENT = "client"
    """A client of a gateway, which acts for its tenant."""


class TokenConfig(Section):
    """One token that is accepted."""

    sha256: str
    """Lower-case hex SHA-256 of the token, as text or as `env:` / `file:`."""
    expires_at: AwareDatetime | None = None
    """The token is refused from then on, and connections that were opened with it end; with an offset, such as
    `2027-01-31T00:00:00Z`. Left out: it holds until it is removed."""


def _as_table(value: object) -> object:
    return {"sha256": value} if isinstance(value, str) else value


def _checked_digests(tokens: list[TokenConfig]) -> list[TokenConfig]:
    for text in (token.sha256 for token in tokens):
        if not text.startswith(("env:", "file:")):
            require_digest(text)
    return tokens


def require_digest(text: str) -> None:
    """Raises `ValueError`, which says what to do, for what is no digest of a token."""
    if not re.fullmatch("[0-9a-f]{64}", text):
        raise ValueError("not 64 lower-case hex digits; make it with: printf %s TOKEN | sha256sum")
    if text in _DIGESTS_OF_NOTHING:
        raise ValueError("the digest of an empty token; make a token with: openssl rand -hex 32")


Tokens = Annotated[list[Annotated[TokenConfig, BeforeValidator(_as_table)]], AfterValidator(_checked_digests)]
"""Digests, or tables of digests that end."""


class RoleConfig(Section):
    """One operator or observer. Pool only."""

    token_sha256: Tokens = Field(default=[])
    """The tokens, as those of a tenant."""


@dataclass(frozen=True, slots=True)
class AcceptedToken:
    """One token that the pool accepts."""

    digest: str
    """Hex SHA-256."""
    role: Role
    name: str
    """The name of the tenant, operator or observer, which has it."""
    expires_at_s: float | None = None
    """Seconds since 1970. None: it has no end."""

    @property
    def id(self) -> str:
        """The name by which logs and commands call it."""
        return token_id(self.digest)


def token_id(digest: str) -> str:
    """The first digits of a token's digest: enough to tell tokens apart, too few to find one."""
    return digest[:_ID_DIGITS]
