"""Keys of requests: what KV depends on is in them, and nothing else."""

from typing import Any

import pytest
import torch
from vllm import PoolingParams, SamplingParams
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.request import Request

from kvtier.keys import BlockHasher, BlockKey, PrefixHasher, tenant_id
from kvtier_vllm.request_keys import RequestKeys

SIZE = 4
HASHER = BlockHasher(tenant_id("red"), PrefixHasher(b"sixteen bytes of", "", SIZE))
TOKENS = list(range(100, 118))
"""Four blocks and a half."""


def _request(tokens: list[int] = TOKENS, **fields: Any) -> Request:
    pooling = fields.pop("pooling_params", None)
    sampling = None if pooling is not None else SamplingParams(max_tokens=8)
    return Request("id", tokens, sampling, pooling, **fields)


def _keys(request: Request) -> RequestKeys:
    return RequestKeys(request, HASHER, salt=request.cache_salt)


def _hashes(**fields: Any) -> list[BlockKey]:
    return _keys(_request(**fields)).first(4)


def _image(name: str, offset: int, length: int) -> MultiModalFeatureSpec:
    position = PlaceholderRange(offset=offset, length=length)
    return MultiModalFeatureSpec(data=None, modality="image", identifier=name, mm_position=position)


def _first_difference(hashes: list[BlockKey], others: list[BlockKey]) -> int:
    """Index of the first block that differs; all that follow must differ too."""
    differs = [one != other for one, other in zip(hashes, others, strict=True)]
    assert differs == sorted(differs), "a chain that comes together again"
    return differs.index(True) if True in differs else len(differs)


def test_hashes_are_those_of_the_tokens() -> None:
    assert _hashes() == HASHER.hash_blocks(TOKENS)


def test_hashes_grow_with_the_request() -> None:
    request = _request()
    keys = _keys(request)
    assert keys.first(2) == _hashes()[:2]
    assert len(keys.first(9)) == 4, "the fifth block is not full"
    request.append_output_token_ids([7, 8, 9])
    assert len(keys.first(9)) == 5
    assert keys.first(9) == _keys(_request([*TOKENS, 7, 8])).first(9)


def test_a_salt_is_in_every_block() -> None:
    assert _first_difference(_hashes(), _hashes(cache_salt="one")) == 0
    assert _first_difference(_hashes(cache_salt="two"), _hashes(cache_salt="one")) == 0
    assert _hashes(cache_salt="one") == _hashes(cache_salt="one")


def test_an_adapter_is_in_every_block() -> None:
    one, other = (RequestKeys(_request(), HASHER, salt=None, adapter=digest).first(4) for digest in (b"one", b"other"))
    assert _first_difference(_hashes(), one) == 0
    assert _first_difference(other, one) == 0
    salted = _hashes(cache_salt="one")
    assert _first_difference(salted, one) == 0, "a salt is no adapter"


def test_keys_do_not_depend_on_when_they_are_asked_for() -> None:
    keys = _keys(_request(cache_salt="one"))
    for count in (1, 2, 3):
        keys.first(count)
    assert keys.first(4) == _hashes(cache_salt="one")


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_embeds": torch.zeros(18, 4)},
        {"pooling_params": PoolingParams()},
        {"mm_features": [_image("cat", 5, 2)]},
        {"resumable": True},
    ],
    ids=["embeddings", "pooling", "image", "streamed input"],
)
def test_what_keys_cannot_tell_apart_is_not_covered(fields: dict[str, Any]) -> None:
    assert RequestKeys.cover(_request())
    assert not RequestKeys.cover(_request(**fields))
