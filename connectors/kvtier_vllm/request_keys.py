"""Keys of vLLM's requests: from tokens and what else their KV depends on, never from vLLM's own hashes."""

from collections.abc import Iterable

from vllm.v1.request import Request

from kvtier.keys import BlockHasher, BlockKey, Extra

_SALT, _ADAPTER = "cache_salt", "lora"


class RequestKeys:
    """The keys of one request's full blocks, made as its tokens become known. Scheduler thread only."""

    def __init__(
        self, request: Request, hasher: BlockHasher, *, salt: str | None, adapter: bytes | None = None
    ) -> None:
        """
        :param hasher: of the request's tenant.
        :param salt: the client's `cache_salt`.
        :param adapter: digest of the request's adapter, if it has one.
        """
        self._request, self._hasher, self._salt, self._adapter = request, hasher, salt, adapter
        self._keys: list[BlockKey] = []

    @staticmethod
    def cover(request: Request) -> bool:
        """Whether keys say all that this request's KV depends on, with the digest of its adapter.

        Not with embeddings in place of tokens, not with images, which vLLM may name by a counter or as the client
        likes, and not where tokens may become others, or
        are no tokens.
        """
        has_tokens = request.prompt_embeds is None and not request.mm_features and not request.resumable
        return has_tokens and request.pooling_params is None and min(request.all_token_ids, default=0) >= 0

    def first(self, num_blocks: int) -> list[BlockKey]:
        """Of the first so many blocks, as far as their tokens are known."""
        size = self._hasher.tokens_per_block
        num_known = len(self._keys)
        num_wanted = min(num_blocks, self._request.num_tokens // size)
        if num_wanted > num_known:
            tokens = self._request.all_token_ids[num_known * size : num_wanted * size]
            parent = self._keys[-1] if self._keys else None
            self._keys += self._hasher.hash_blocks(tokens, parent=parent, extras=self._extras(num_known))
        return self._keys[:num_blocks]

    def _extras(self, start: int) -> dict[int, Iterable[Extra]]:
        """By block, counted from `start`. What the first block depends on is in the hashes of all that follow."""
        if start:
            return {}
        named = ((_SALT, None if self._salt is None else self._salt.encode()), (_ADAPTER, self._adapter))
        return {0: [Extra(kind, data, 0) for kind, data in named if data is not None]}
