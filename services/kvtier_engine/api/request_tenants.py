"""Finds the tenant of a request: the only one, or the one whose API key it has, or the one that a gateway names."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from starlette.requests import Request as HttpRequest

from kvtier.config import Config
from kvtier.config.accepted import accepted_engine_keys
from kvtier.config.credentials import AcceptedToken
from kvtier_engine.api.http_requests import ApiError
from kvtier_engine.api.requests import SamplingBody


@dataclass(frozen=True, slots=True)
class RequestTenants:
    """Event loop only."""

    only: str | None = None
    """The tenant of all requests of which nothing else is known."""
    api_keys: Sequence[AcceptedToken] = ()
    """Keys of clients. If there are none, whoever reaches the port may ask, and name a tenant where a gateway may."""

    @classmethod
    def of(cls, config: Config) -> Self:
        """Returns who is served. Raises `ConfigError` where keys are no good."""
        keys = accepted_engine_keys(config)
        return cls(None if keys or config.gateway_tenants else config.tenant, keys)

    @property
    def have_keys_of_several(self) -> bool:
        """Whether clients of one tenant could change what another one has."""
        return len({key.name for key in self.api_keys}) > 1

    def of_connection(self, http: HttpRequest) -> str | None:
        """What is known before the body is read. None: nothing, or there is no tenant."""
        tenant: str | None = http.scope["state"].get("tenant", self.only)
        return tenant

    def of_request(self, http: HttpRequest, body: SamplingBody) -> str | None:
        """The tenant that a key or the request itself names. None: neither does.

        :raises ApiError: both do.
        """
        if not self.api_keys:
            return body.tenant
        if body.tenant is not None:
            param = "kv_transfer_params.kvtier.tenant"
            raise ApiError(400, f"{param}: the API key says whose the request is; leave it out", param=param)
        return self.of_connection(http)
