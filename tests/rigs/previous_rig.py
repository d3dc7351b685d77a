"""Keys of the same tokens under several secrets of a tenant, and what lookups are told of the previous ones."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from clock_rig import StillClock
from hierarchy_rig import TENANT
from kvtier.identity.keys import BlockHasher, BlockKey, PrefixHasher, PreviousHasher, TenantId
from kvtier.offload import PreviousKeys

NEW, OLD, OLDEST = b"n" * 32, b"o" * 32, b"p" * 32
RETIRES_S = 2000.0


def hasher(secret: bytes, *, tenant: TenantId = TENANT, salt: str = "") -> BlockHasher:
    return BlockHasher(tenant, PrefixHasher(secret, salt, 1))


def keys_of(
    num_blocks: int, secret: bytes, *, tenant: TenantId = TENANT, salt: str = "", seed: int = 0
) -> list[BlockKey]:
    """:param seed: of the tokens."""
    return hasher(secret, tenant=tenant, salt=salt).hash_blocks(np.arange(num_blocks, dtype=np.int32) + 1000 * seed)


class Rotated:
    """What an engine knows of previous secrets, and how many keys it has made by each."""

    def __init__(self, *secrets: bytes, tenant: TenantId = TENANT, salt: str = "") -> None:
        self.clock = StillClock()
        self._hashers = {
            secret: PreviousHasher(hasher(secret, tenant=tenant, salt=salt), RETIRES_S, self.clock)
            for secret in secrets
        }
        self._tenant, self._salt = tenant, salt
        self.num_made = dict.fromkeys(secrets, 0)

    def previous(self, start: int = 0, seed: int = 0) -> list[PreviousKeys]:
        """For a lookup whose first key is that of the block at `start`."""
        return [PreviousKeys(each, partial(self._first, secret, start, seed)) for secret, each in self._hashers.items()]

    def _first(self, secret: bytes, start: int, seed: int, num_keys: int) -> Sequence[BlockKey]:
        self.num_made[secret] = max(self.num_made[secret], start + num_keys)
        return keys_of(start + num_keys, secret, tenant=self._tenant, salt=self._salt, seed=seed)[start:]
