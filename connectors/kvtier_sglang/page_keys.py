"""What the pool calls SGLang's pages: the digests that SGLang makes of tokens, keyed with the tenant's secret."""

import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache

from kvtier.build.hashers import tenant_hasher
from kvtier.config import Config
from kvtier.identity.keys import BlockHasher, BlockKey, block_key

Namer = Callable[[str], BlockKey]
"""The key of a page."""
_ANY_TOKENS = 16
"""Tokens of a block, which every key's root holds. Any number does: a page's length is in its namespace."""
_DIGEST_DIGITS = 64
_TEXT_LABEL = b"kvtier.sglang.text.v1"
_REMEMBERED = 1 << 16


class PageKeys:
    """Block keys of one tenant's pages. Any thread. What a query has made, the read after it finds."""

    def __init__(self, config: Config) -> None:
        """:raises ConfigError: the tenant's secret is missing."""
        hasher = tenant_hasher(config, config.only_tenant(), _ANY_TOKENS)
        self._key_of = _namer(hasher)
        self._previous = [(each, _namer(each.hasher)) for each in hasher.previous]

    def of(self, pages: Sequence[str]) -> list[BlockKey]:
        """One per page, in order."""
        return [self._key_of(page) for page in pages]

    def under_previous(self) -> list[Namer]:
        """What names pages by each previous secret that has not retired, the newest first."""
        return [namer for each, namer in self._previous if not each.is_retired]


def _namer(hasher: BlockHasher) -> Namer:
    @lru_cache(maxsize=_REMEMBERED)
    def key_of(page: str) -> BlockKey:
        return block_key(hasher.tenant, hasher.external_key(_digest_of(page)))

    return key_of


def _digest_of(page: str) -> bytes:
    """SGLang's digest, or one of whatever else it calls a page."""
    if len(page) == _DIGEST_DIGITS:
        try:
            digest = bytes.fromhex(page)
        except ValueError:
            digest = b""
        if digest.hex() == page:
            return digest
    # Longer than a digest, so that no text stands for one.
    return _TEXT_LABEL + hashlib.sha256(page.encode()).digest()
