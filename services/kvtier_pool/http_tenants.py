"""`/tenants` of the HTTP port: what administration answers to bearer tokens."""

from typing import Any

from kvtier.errors import InvalidInputError, KvtierError
from kvtier_pool.administration import Administration
from kvtier_pool.auth import LoginRefusedError, bearer_token
from kvtier_pool.logins import Logins

_PATH, _PURGE = "/tenants", "/purge"


class HttpTenants:
    """`GET /tenants`: the figures that the peer may see. `POST /tenants/NAME/purge`: removes all that a tenant has. Any
    thread."""

    def __init__(self, administration: Administration, logins: Logins, *, in_clear: str | None) -> None:
        """:param in_clear: why no token may be sent to the HTTP port, and what to do; None: one may."""
        self._administration = administration
        self._logins = logins
        self._in_clear = in_clear

    def answer(self, method: str, path: str, authorization: str | None, peer: str) -> tuple[int, dict[str, Any]]:
        """Status and JSON. Blocks for a moment where it refuses."""
        if self._in_clear is not None:
            return 403, {"error": self._in_clear}
        try:
            token = bearer_token(authorization) if authorization is not None else None
            login = self._logins.at("http", peer).log_in(token)
        except LoginRefusedError as error:
            return 401, {"error": str(error)}
        try:
            if (method, path) == ("GET", _PATH):
                return 200, self._administration.report(login.role, login.name)
            if method == "POST" and path.startswith(f"{_PATH}/") and path.endswith(_PURGE):
                name = path.removeprefix(f"{_PATH}/").removesuffix(_PURGE)
                return 200, self._administration.purge(login.role, login.name, name)
            return 404, {"error": f"try GET {_PATH}, or POST {_PATH}/NAME{_PURGE}"}
        except LoginRefusedError as error:
            return 403, {"error": str(error)}
        except InvalidInputError as error:
            return 404, {"error": str(error)}
        except KvtierError as error:
            return 503, {"error": str(error)}
