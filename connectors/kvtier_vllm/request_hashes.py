"""The hashes by which vLLM tells a request's blocks apart, and what it hashes: both depend on its version."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    ExternalBlockHash,
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    resolve_block_hashes,
)
from vllm.v1.request import Request


def salt_device_cache(request: Request, salt: str) -> None:
    """Tells the request's blocks in vLLM's own prefix cache apart by this. For a request that is not scheduled yet."""
    request.cache_salt = salt
    _hash_again(request)


def name_adapter(request: Request, name: str) -> None:
    """Tells the request's blocks in vLLM's own prefix cache apart by this, too. For one that is not scheduled yet.

    Only hashes differ. A `cache_salt` would also be in KV events, and routers would find nothing: they look for the one
    that the client gave.
    """
    hashes: Callable[[Request], list[BlockHash]] | None = request._block_hasher
    if hashes is None:
        return
    given = request.cache_salt
    salt = name if given is None else f"{name}/{given}"

    def hash_with_name(request: Request) -> list[BlockHash]:
        request.cache_salt = salt
        try:
            return hashes(request)
        finally:
            request.cache_salt = given

    request._block_hasher = hash_with_name
    _hash_again(request)


def name_media(request: Request, names: Sequence[str]) -> None:
    """What vLLM tells the request's media apart by, in its caches of KV and of what encoders made.

    For a request that is not scheduled yet.
    """
    features = zip(request.mm_features, names, strict=True)
    request.mm_features = [replace(feature, identifier=name) for feature, name in features]
    _hash_again(request)


def event_hashes(request: Request, kv: KVCacheManager, span: range, tokens_per_block: int) -> list[ExternalBlockHash]:
    """What vLLM's events call these blocks of the request, as far as they are known."""
    hashes = resolve_block_hashes(request.block_hashes, kv.block_pool.hash_block_size, tokens_per_block)
    return [maybe_convert_block_hash(hashes[position]) for position in span if position < len(hashes)]


def hash_inputs(request: Request, position: int, tokens_per_block: int) -> tuple[Any, ...] | None:
    """What vLLM hashes of a block beside its tokens."""
    start = position * tokens_per_block
    inputs: tuple[Any, ...] | None = generate_block_hash_extra_keys(request, start, start + tokens_per_block, 0)[0]
    return inputs


def _hash_again(request: Request) -> None:
    request.block_hashes.clear()
    request.update_block_hashes()
