"""Keys of vLLM's requests: from tokens and what else their KV depends on, never from vLLM's own hashes."""

from collections import defaultdict
from collections.abc import Sequence

from vllm.v1.request import Request

from kvtier.identity.keys import BlockHasher, BlockKey, Extra, PreviousHasher
from kvtier_vllm.content.media import Medium

_SALT, _ADAPTER, _WEIGHTS, _MEDIUM = "cache_salt", "lora", "weights", "medium"


class RequestKeys:
    """The keys of one request's full blocks, made as its tokens become known. Scheduler thread only."""

    def __init__(
        self,
        request: Request,
        hasher: BlockHasher,
        *,
        salt: str | None,
        adapter: bytes = b"",
        weights: bytes | None = None,
    ) -> None:
        """
        :param hasher: of the request's tenant.
        :param salt: the client's `cache_salt`.
        :param adapter: digest of the request's adapter; empty if it has none.
        :param weights: what tells the weights from those that vLLM has started with; None: they are those.
        """
        self._request, self._hasher, self._salt = request, hasher, salt
        self.adapter = adapter
        self._weights = weights
        self._media: Sequence[Medium] = ()
        self._keys: list[BlockKey] = []

    @property
    def adapter_name(self) -> str | None:
        """The adapter's name, of tenant and content, which nobody without the tenant's secret can know.

        None: it has no adapter.
        """
        if not self.adapter:
            return None
        return f"kvtier-{self._hasher.external_key(self._hasher.tenant + self.adapter).hex()}"

    @staticmethod
    def cover(request: Request) -> bool:
        """Whether keys say all that this request's KV depends on, with the digests of its adapter and its media.

        Not with embeddings in place of tokens, and not where tokens may become others, or are no tokens.
        """
        has_tokens = request.prompt_embeds is None and not request.resumable
        return has_tokens and request.pooling_params is None and min(request.all_token_ids, default=0) >= 0

    def depend_on(self, media: Sequence[Medium]) -> list[str]:
        """Takes in what the request's media are, before the first key is made.

        Gives names for them, of tenant, content and adapter, which only who has the tenant's secret can know.
        """
        assert not self._keys
        self._media = media
        whose, adapter = self._hasher.tenant, self.adapter
        return [f"kvtier-{self._hasher.external_key(whose + medium.digest + adapter).hex()}" for medium in media]

    def change_weights(self, weights: bytes | None) -> None:
        """Other weights will compute what is left of the request: it has other keys from now on."""
        self._weights, self._keys = weights, []

    def previous(self) -> list[tuple[PreviousHasher, "RequestKeys"]]:
        """The request's keys under the previous secrets of its tenant, the newest first. Nothing of them is hashed yet;
        they hold as long as weights and media stay as they are."""
        return [(each, self._under(each.hasher)) for each in self._hasher.previous]

    def first(self, num_blocks: int) -> list[BlockKey]:
        """The keys of the first so many blocks, as far as their tokens are known."""
        size = self._hasher.tokens_per_block
        num_known = len(self._keys)
        num_wanted = min(num_blocks, self._request.num_tokens // size)
        if num_wanted > num_known:
            tokens = self._request.all_token_ids[num_known * size : num_wanted * size]
            parent = self._keys[-1] if self._keys else None
            extras = self._extras(range(num_known, num_wanted))
            self._keys += self._hasher.hash_blocks(tokens, parent=parent, extras=extras)
        return self._keys[:num_blocks]

    def _under(self, hasher: BlockHasher) -> "RequestKeys":
        keys = RequestKeys(self._request, hasher, salt=self._salt, adapter=self.adapter, weights=self._weights)
        keys._media = self._media
        return keys

    def _extras(self, span: range) -> dict[int, list[Extra]]:
        """The extras by block, counted from the first of `span`. They are in the hashes of all later blocks, too."""
        extras: defaultdict[int, list[Extra]] = defaultdict(list)
        if not span.start:
            salt = None if self._salt is None else self._salt.encode()
            named = ((_SALT, salt), (_ADAPTER, self.adapter or None), (_WEIGHTS, self._weights))
            extras[0] += [Extra(kind, data, 0) for kind, data in named if data is not None]
        for medium in self._media:
            block, offset = divmod(medium.offset, self._hasher.tokens_per_block)
            if block in span:
                extras[block - span.start].append(Extra(_MEDIUM, medium.digest, offset))
        return extras
