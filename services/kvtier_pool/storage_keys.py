"""The storage keys of a pool's tenants, which follow its configuration while it runs."""

import logging
from collections.abc import Mapping

from kvtier.codec.sealed_form import StorageSeal
from kvtier.config import Config
from kvtier.errors import ConfigError
from kvtier.identity.keys import TenantId, tenant_id

_log = logging.getLogger(__name__)


class StorageKeys:
    """What the tiers below memory seal with. One thread at a time changes it."""

    def __init__(self, config: Config) -> None:
        """Raises `ConfigError` for keys that cannot be read."""
        table = config.pool_service
        self._is_used = table.disk_dir is not None or bool(table.redis_url)
        self.seals = config.storage_seals(config.tenants)
        """The tiers', which see what `take` gives them at their next block."""

    def of(self, config: Config) -> Mapping[TenantId, StorageSeal]:
        """The seals that this configuration asks for, for `take`. A tenant that has lost its keys there keeps what it
        has until the pool starts anew: it would be stored as it is.

        Raises `ConfigError` for keys that cannot be read, and for a tenant that had none: its blocks of before lie
        there as they are, and some may be on their way.
        """
        if not self._is_used:
            return {}
        before = self.seals.by_tenant
        for name, tenant in config.tenants.items():
            if tenant.storage_keys is not None and tenant_id(name) not in before:
                raise ConfigError(
                    f"tenants.{name}.storage_keys: this pool started without, and would store its blocks as they are: "
                    "restart it"
                )
        return {**before, **config.storage_seals(config.tenants).by_tenant}

    def take(self, seals: Mapping[TenantId, StorageSeal]) -> None:
        """Seals and opens by these from now on. Blocks that are being sealed keep the key that they have begun with."""
        for tenant, seal in seals.items():
            if seal.keys.newest != self.seals.by_tenant[tenant].keys.newest:
                _log.info("tenant %s: storage key %d seals from now on", tenant.hex(), seal.keys.newest)
        self.seals.by_tenant = seals
