"""What the pool calls SGLang's pages: the digests that SGLang makes of tokens, keyed with the tenant's secret."""

import hashlib
import logging
from collections.abc import Sequence
from functools import lru_cache

from kvtier.config import Config
from kvtier.identity.keys import BlockKey, PrefixHasher, block_key, tenant_id

_log = logging.getLogger(__name__)
_ANY_TOKENS = 16
"""Tokens of a block, which every key's root holds. Any number does: a page's length is in its namespace."""
_DIGEST_DIGITS = 64
_TEXT_LABEL = b"kvtier.sglang.text.v1"
_REMEMBERED = 1 << 16


class PageKeys:
    """Block keys of one tenant's pages. Any thread. What a query has made, the read after it finds."""

    def __init__(self, config: Config) -> None:
        """:raises ConfigError: the tenant's secret is missing."""
        name = config.only_tenant()
        tenant = tenant_id(name)
        if config.tenants[name].previous_secrets:
            _log.warning("tenants.%s.previous_secrets: SGLang's pages are looked for under the secret alone", name)
        hasher = PrefixHasher(config.chain_secret(name), config.tenants[name].salt, _ANY_TOKENS)

        @lru_cache(maxsize=_REMEMBERED)
        def key_of(page: str) -> BlockKey:
            return block_key(tenant, hasher.external_key(_digest_of(page)))

        self._key_of = key_of

    def of(self, pages: Sequence[str]) -> list[BlockKey]:
        """One per page, in order."""
        return [self._key_of(page) for page in pages]


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
