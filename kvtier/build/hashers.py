"""What names the blocks of an engine's tenants: their secrets, salts and previous secrets, as configured."""

import logging
from collections.abc import Sequence

from kvtier.config import Config
from kvtier.identity.keys import BlockHasher, PrefixHasher, PreviousHasher, tenant_id

_log = logging.getLogger(__name__)


def tenant_hasher(config: Config, name: str, tokens_per_block: int) -> BlockHasher:
    """Returns the hasher of one of the engine's tenants, with those of its previous secrets.

    Warns of previous secrets that have retired. Raises `ConfigError` where a secret is missing or no good.
    """

    def of_secret(secret: bytes, previous: Sequence[PreviousHasher] = ()) -> BlockHasher:
        chain = PrefixHasher(secret, config.tenants[name].salt, tokens_per_block)
        return BlockHasher(tenant_id(name), chain, previous)

    previous = [PreviousHasher(of_secret(secret), retire_at_s) for secret, retire_at_s in config.previous_secrets(name)]
    for place, each in enumerate(previous):
        if each.is_retired:
            _log.warning(
                "tenants.%s.previous_secrets[%d]: its retire_at has passed, so it is not used; remove it", name, place
            )
    return of_secret(config.chain_secret(name), previous)
