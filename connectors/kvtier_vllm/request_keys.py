"""Chain hashes of vLLM's requests: from tokens and what else their KV depends on, never from vLLM's own hashes."""

from collections.abc import Iterable

from vllm.v1.request import Request

from kvtier.keys import CHAIN_START, ChainHash, Extra, PrefixHasher

_SALT, _ADAPTER = "cache_salt", "lora"


class RequestKeys:
    """The hashes of one request's full blocks, made as its tokens become known. Scheduler thread only."""

    def __init__(self, request: Request, hasher: PrefixHasher, *, adapter: bytes | None = None) -> None:
        """:param adapter: digest of the request's adapter, if it has one."""
        self._request, self._hasher, self._adapter = request, hasher, adapter
        self._hashes: list[ChainHash] = []

    @staticmethod
    def cover(request: Request) -> bool:
        """Whether keys say all that this request's KV depends on, with the digest of its adapter.

        Not with embeddings in place of tokens, not with images, which vLLM may name by a counter or as the client
        likes, and not where tokens may become others.
        """
        has_tokens = request.prompt_embeds is None and not request.mm_features and not request.resumable
        return has_tokens and request.pooling_params is None

    def first(self, num_blocks: int) -> list[ChainHash]:
        """Of the first so many blocks, as far as their tokens are known."""
        size = self._hasher.tokens_per_block
        num_known = len(self._hashes)
        num_wanted = min(num_blocks, self._request.num_tokens // size)
        if num_wanted > num_known:
            tokens = self._request.all_token_ids[num_known * size : num_wanted * size]
            parent = self._hashes[-1] if self._hashes else CHAIN_START
            self._hashes += self._hasher.hash_blocks(tokens, parent=parent, extras=self._extras(num_known))
        return self._hashes[:num_blocks]

    def _extras(self, start: int) -> dict[int, Iterable[Extra]]:
        """By block, counted from `start`. What the first block depends on is in the hashes of all that follow."""
        if start:
            return {}
        salt = self._request.cache_salt
        named = ((_SALT, None if salt is None else salt.encode()), (_ADAPTER, self._adapter))
        return {0: [Extra(kind, data, 0) for kind, data in named if data is not None]}
