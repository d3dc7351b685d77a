"""What operators, observers and tenants may learn of a pool's tenants, whichever door they come through."""

import threading
from collections.abc import Mapping
from typing import Any

from kvtier.config.config import Config
from kvtier.config.credentials import Role
from kvtier.config.tenant import TenantConfig
from kvtier.errors import UnavailableError
from kvtier.identity.keys import tenant_id
from kvtier.store.store import Store
from kvtier.store.tenant_counts import Counts
from kvtier_pool.audit import AuditLog
from kvtier_pool.auth import LoginRefusedError
from kvtier_pool.metrics import PoolMetrics

Answer = dict[str, Any]
"""What is sent as JSON."""


_PURGE_S = 600.0
_ANYBODY = tenant_id("anybody")
"""A tenant whose share does not matter: what all have together is the same."""


class Administration:
    """Answers by role: an operator sees all tenants, a tenant itself, an observer what all have together, in percent.

    Any thread.
    """

    def __init__(self, store: Store, metrics: PoolMetrics, audit: AuditLog, config: Config) -> None:
        self._store = store
        self._metrics = metrics
        self._audit = audit
        self._tenants: Mapping[str, TenantConfig] = config.tenants
        """Replaced as a whole."""
        self._purging = threading.Lock()
        """Held while a tenant is purged."""

    def set_tenants(self, config: Config) -> None:
        """These are the tenants from now on."""
        self._tenants = config.tenants

    def report(self, role: Role, name: str) -> Answer:
        """The figures that this peer may see, since the pool's start.

        :param name: of the operator, observer or tenant.
        """
        if role is Role.OPERATOR:
            return {"tiers": self._tiers(), "tenants": {each: self._figures(each) for each in sorted(self._tenants)}}
        if role is Role.TENANT:
            return {"tenants": {name: self._figures(name)}}
        counts = self._store.counts.of(None)
        asked = counts.num_hits + counts.num_misses
        return {
            "tiers": self._tiers(),
            "num_tenants": len(self._tenants),
            "hit_percent": round(100 * counts.num_hits / asked) if asked else None,
        }

    def counts(self) -> list[tuple[str, Counts]]:
        """Names of all tenants, and what each asked for."""
        return [(name, self._store.counts.of(tenant_id(name))) for name in sorted(self._tenants)]

    def purge(self, role: Role, name: str, tenant: str) -> Answer:
        """Removes everything of a tenant from memory, disk and Redis; what was there, and what is left. Blocks until
        that is done, ten minutes at the most.

        Raises `LoginRefusedError` for all but operators, `InvalidInputError` for what is no name of a tenant, and
        `UnavailableError` while another purge is under way.

        :param name: of who asks for it.
        :param tenant: by its name; it need not be configured any more.
        """
        self._require_operator(role, name, f"purge tenant {tenant[:100]!r}")
        purged = tenant_id(tenant)
        if not self._purging.acquire(blocking=False):
            raise UnavailableError("another purge is under way; try again when it has ended")
        try:
            self._audit.note("purge", by=name, tenant=tenant)
            report = self._store.purge(purged, _PURGE_S)
            self._audit.note("purged", by=name, tenant=tenant, removed=report.removed, problems=report.problems)
        finally:
            self._purging.release()
        configured = self._tenants.get(tenant)
        has_credentials = configured is not None and bool(configured.token_sha256 or configured.certificate_names)
        return {"removed": report.removed, "problems": report.problems, "has_credentials": has_credentials}

    def _require_operator(self, role: Role, name: str, deed: str) -> None:
        """Raises `LoginRefusedError`, and notes it, unless the peer may administer.

        :param deed: what it is that the peer wants to do.
        """
        if role is not Role.OPERATOR:
            self._audit.note_repeated("refused", (role, name), role=role, name=name, deed=deed)
            raise LoginRefusedError("role", f"{role} {name!r} may not {deed}: only operators may", name=name)

    def _tiers(self) -> dict[str, Answer]:
        """How full tiers on this machine are, in percent: of two tenants, an exact total would tell each what the
        other one has."""
        shares = self._store.usage(_ANYBODY)
        return {
            share.tier: {
                "capacity_bytes": share.capacity_bytes,
                "used_percent": share.used_percent,
                "state": share.state.value,
            }
            for share in shares
        }

    def _figures(self, name: str) -> Answer:
        tenant = tenant_id(name)
        counts = self._store.counts.of(tenant)
        config = self._tenants.get(name, TenantConfig())
        quotas = {of: getattr(config, of).model_dump(exclude_none=True) for of in ("memory", "disk", "redis", "rate")}
        return {
            "tiers": {
                share.tier: {"num_blocks": share.num_blocks, "used_bytes": share.used_bytes}
                for share in self._store.usage(tenant)
            },
            "num_hits": counts.num_hits,
            "num_misses": counts.num_misses,
            "num_evicted": counts.num_evicted,
            "num_full": counts.num_full,
            "num_throttled": counts.num_throttled,
            "num_refused": self._metrics.refusals_of(name),
            "quota": quotas,
            "tokens": [token.model_dump(mode="json", include={"expires_at"}) for token in config.token_sha256],
        }
