"""Which tenant a request belongs to, where an engine serves several for a gateway; its device cache knows it too.

vLLM's own prefix cache tells requests apart by `cache_salt` alone: there goes the tenant's name, too.
"""

import logging
import secrets
from typing import TypeGuard

from vllm.v1.request import Request

from kvtier.config import Config
from kvtier_vllm import request_hashes

_log = logging.getLogger(__name__)
_MOST_WARNINGS = 32
"""The most names that are told of: a gateway that passes on whatever its clients say must not fill the log."""


class Tenants:
    """Scheduler thread only."""

    def __init__(self, config: Config) -> None:
        self._own, self._named = config.tenant, frozenset(config.gateway_tenants)
        self._warned: set[str] = set()
        """What requests have named that was told already."""

    def may_be(self, tenant: object) -> TypeGuard[str]:
        """Whether this is the name of a tenant that this engine serves."""
        return isinstance(tenant, str) and (tenant == self._own or tenant in self._named)

    def of(self, request: Request, named: object) -> tuple[str | None, str | None]:
        """Name of the request's tenant, and the `cache_salt` that its client gave.

        The name is None if the request names a tenant that it may not use, or if its tenant cannot be told: it bypasses
        the cache by a random salt, so it computes everything itself, and no other request finds what it computed.

        :param named: what the request itself names; None: nothing.
        """
        salt = request.cache_salt
        # Behind a gateway, a request that names no tenant has none: vLLM drops what some kinds of requests say.
        tenant = self._own if named is None and not self._named else named
        if not self.may_be(tenant):
            self._warn(named)
            request_hashes.salt_device_cache(request, secrets.token_hex(16))
            return None, salt
        if self._named:
            request_hashes.salt_device_cache(request, tenant if salt is None else f"{tenant}/{salt}")
        return tenant, salt

    def _warn(self, named: object) -> None:
        wrong = repr(named[:100]) if isinstance(named, str) else "nobody" if named is None else "no name"
        if wrong not in self._warned and len(self._warned) < _MOST_WARNINGS:
            self._warned.add(wrong)
            _log.warning(
                "a request uses no cache: the tenant that its kv_transfer_params name is %s, and must be `tenant` or, "
                "where a gateway names them, one of `gateway_tenants`",
                wrong,
            )
