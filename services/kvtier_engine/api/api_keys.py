"""API keys: `Authorization: Bearer KEY` says whose a request is."""

import hashlib
import hmac
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from kvtier.clock import Clock
from kvtier.config.credentials import AcceptedToken
from kvtier.protocol.openai import error_body, error_kind
from kvtier.system.logs import add_log_fields

_SCHEME = "bearer "
_MIN_KEY_BYTES = 16
"""Shorter ones can be guessed, known or not."""
_KEPT_BY_KEYS = "/v1/"
"""Paths that begin so need a key; those of probes and Prometheus do not."""


class ApiKeys:
    """An ASGI application before another one, which finds the tenant of the request's key as `tenant` in its state.

    Requests without a key that is known get 401, whatever is in them: nothing of them is read.
    """

    def __init__(self, app: ASGIApp, accepted: Iterable[AcceptedToken], clock: Clock) -> None:
        """:param clock: seconds since 1970, for keys that end."""
        self._app, self._clock = app, clock
        self._known = [(bytes.fromhex(key.digest), key) for key in accepted]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI's."""
        if not scope["path"].startswith(_KEPT_BY_KEYS):
            await self._app(scope, receive, send)
            return
        found = self._accepted(Headers(scope=scope).getlist("authorization"))
        if found is None or self._is_over(found):
            why = "has expired" if found is not None else "is missing, not known here, or shorter than 16 bytes"
            message = f"the API key {why}: send the header `Authorization: Bearer KEY`"
            body = error_body(message, error_kind(401), code="invalid_api_key")
            await JSONResponse(body, 401, headers={"WWW-Authenticate": "Bearer"})(scope, receive, send)
            return
        scope.setdefault("state", {})["tenant"] = found.name
        add_log_fields(tenant=found.name)
        await self._app(scope, receive, send)

    def _accepted(self, authorizations: list[str]) -> AcceptedToken | None:
        """The time taken does not depend on how much of a key is right: all digests are compared, each in constant
        time."""
        if len(authorizations) != 1 or authorizations[0][: len(_SCHEME)].lower() != _SCHEME:
            return None
        said = authorizations[0][len(_SCHEME) :].encode("latin-1")
        if len(said) < _MIN_KEY_BYTES:
            return None
        digest = hashlib.sha256(said).digest()
        found: AcceptedToken | None = None
        for known, key in self._known:
            if hmac.compare_digest(known, digest):
                found = key
        return found

    def _is_over(self, key: AcceptedToken) -> bool:
        return key.expires_at_s is not None and self._clock() >= key.expires_at_s
