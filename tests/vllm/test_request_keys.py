"""Keys of requests: what KV depends on is in them, and nothing else."""

from typing import Any

import pytest
import torch
from vllm import PoolingParams, SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvtier.identity.keys import BlockHasher, BlockKey, PrefixHasher, PreviousHasher, tenant_id
from kvtier_vllm.content.media import Medium
from kvtier_vllm.request_hashes import hash_inputs, name_adapter
from kvtier_vllm.requests.keys import RequestKeys

SIZE = 4
SECRET = b"sixteen bytes of"
HASHER = BlockHasher(tenant_id("red"), PrefixHasher(SECRET, "", SIZE))
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


def _seeing(*media: tuple[bytes, int]) -> list[BlockKey]:
    """The keys of a request that sees these media, each given as digest and offset."""
    keys = _keys(_request())
    keys.depend_on([Medium(digest, offset) for digest, offset in media])
    return keys.first(4)


def _first_difference(hashes: list[BlockKey], others: list[BlockKey]) -> int:
    """Index of the first block that differs; all that follow must differ too."""
    differs = [one != other for one, other in zip(hashes, others, strict=True)]
    assert differs == sorted(differs), "a chain that comes together again"
    return differs.index(True) if True in differs else len(differs)


def test_hashes_are_those_of_the_tokens() -> None:
    assert _hashes() == HASHER.hash_blocks(TOKENS)


def test_previous_secrets_name_the_same_content() -> None:
    """Salt, adapter, weights and media are in the keys of an engine that has that secret, and so they are in these."""
    old = BlockHasher(tenant_id("red"), PrefixHasher(b"the old secret of red", "", SIZE))
    new = BlockHasher(old.tenant, PrefixHasher(SECRET, "", SIZE), [PreviousHasher(old, 2000.0, lambda: 1000.0)])
    request = _request(cache_salt="theirs")

    def keys_by(hasher: BlockHasher) -> RequestKeys:
        keys = RequestKeys(request, hasher, salt=request.cache_salt, adapter=b"a" * 32, weights=b"w" * 32)
        keys.depend_on([Medium(b"m" * 32, 6)])
        return keys

    [(hasher, previous)] = keys_by(new).previous()
    assert (hasher.hasher, hasher.is_retired) == (old, False)
    assert previous.first(2) == keys_by(old).first(4)[:2]
    assert previous.first(4) == keys_by(old).first(4) != keys_by(new).first(4)
    assert not keys_by(old).previous()


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


def test_weights_that_were_loaded_later_are_in_every_block() -> None:
    keys = RequestKeys(_request(), HASHER, salt=None, weights=b"one")
    one = keys.first(4)
    assert _first_difference(_hashes(), one) == 0
    assert _first_difference(one, RequestKeys(_request(), HASHER, salt=None, adapter=b"one").first(4)) == 0
    keys.change_weights(b"other")
    assert _first_difference(one, keys.first(4)) == 0
    keys.change_weights(None)
    assert keys.first(4) == _hashes(), "these are the weights of the start"


def test_names_of_adapters_are_in_vllms_hashes_and_in_nothing_else() -> None:
    init_none_hash(sha256)
    hasher = get_request_block_hasher(SIZE, sha256)

    def named(*names: str, salt: str | None = None) -> Request:
        request = _request(cache_salt=salt, block_hasher=hasher)
        for name in names:
            name_adapter(request, name)
        return request

    plain, one, salted = named(), named("one"), named("one", salt="given")
    assert not {*plain.block_hashes} & {*one.block_hashes}
    assert one.block_hashes == named("one").block_hashes
    assert len({each.block_hashes[0] for each in (plain, one, salted, named("two"), named(salt="given"))}) == 5
    assert [hash_inputs(each, 0, SIZE) for each in (one, salted)] == [None, (("cache_salt", "given"),)]
    one.append_output_token_ids([7, 8, 9])
    assert len(one.block_hashes) == 5
    name_adapter(no_caching := _request(), "one")
    assert no_caching.block_hashes == []


def test_adapters_have_names_by_content_and_tenant() -> None:
    def name(adapter: bytes, hasher: BlockHasher = HASHER) -> str | None:
        return RequestKeys(_request(), hasher, salt=None, adapter=adapter).adapter_name

    assert name(b"") is None
    assert name(b"one") == name(b"one")
    others = BlockHasher(tenant_id("blue"), PrefixHasher(SECRET, "", SIZE))
    assert len({name(b"one"), name(b"other"), name(b"one", others)}) == 3


def test_keys_do_not_depend_on_when_they_are_asked_for() -> None:
    keys = _keys(_request(cache_salt="one"))
    for count in (1, 2, 3):
        keys.first(count)
    assert keys.first(4) == _hashes(cache_salt="one")


def test_a_medium_is_in_its_first_block_and_all_that_follow() -> None:
    assert _first_difference(_hashes(), _seeing((b"cat", 0))) == 0
    assert _first_difference(_hashes(), _seeing((b"cat", 5))) == 1
    assert _first_difference(_hashes(), _seeing((b"cat", 15))) == 3
    assert _first_difference(_hashes(), _seeing((b"cat", 16))) == 4, "the fifth block is not full"
    assert _first_difference(_seeing((b"cat", 5)), _seeing((b"dog", 5))) == 1


def test_media_do_not_meet_elsewhere_or_in_other_order() -> None:
    assert _first_difference(_seeing((b"cat", 5)), _seeing((b"cat", 6))) == 1, "moved by a token"
    assert _first_difference(_seeing((b"cat", 5)), _seeing((b"cat", 9))) == 1, "moved by a block"
    both = _seeing((b"cat", 5), (b"dog", 7))
    assert _first_difference(both, _seeing((b"dog", 5), (b"cat", 7))) == 1, "swapped in one block"
    assert _first_difference(both, _seeing((b"cat", 5))) == 1, "one of them"
    apart = _seeing((b"cat", 2), (b"dog", 9))
    assert _first_difference(apart, _seeing((b"dog", 2), (b"cat", 9))) == 0, "swapped"
    assert _first_difference(apart, _seeing((b"cat", 2), (b"cow", 9))) == 2, "what comes before is the same"


def test_keys_of_media_do_not_depend_on_when_they_are_asked_for() -> None:
    media = [Medium(b"cat", 2), Medium(b"dog", 9), Medium(b"cow", 17)]
    at_once, one_by_one, later = (_keys(request) for request in (_request([*TOKENS, 7, 8]), _request(), _request()))
    for keys in (at_once, one_by_one, later):
        keys.depend_on(media)
    for count in (1, 2, 3, 4):
        one_by_one.first(count)
    for keys in (one_by_one, later):
        keys._request.append_output_token_ids([7, 8])
    assert at_once.first(5) == one_by_one.first(5) == later.first(5)


def test_names_of_media_are_of_tenant_content_and_adapter() -> None:
    makers = [
        RequestKeys(_request(), HASHER, salt=None),
        RequestKeys(_request(), HASHER, salt=None, adapter=b"one"),
        RequestKeys(_request(), BlockHasher(tenant_id("blue"), PrefixHasher(SECRET, "", SIZE)), salt=None),
        RequestKeys(_request(), BlockHasher(tenant_id("red"), PrefixHasher(SECRET[::-1], "", SIZE)), salt=None),
    ]
    names = [maker.depend_on([Medium(b"cat", 2), Medium(b"dog", 9), Medium(b"cat", 17)]) for maker in makers]
    assert all(cat == again for cat, _, again in names)
    assert len({name for three in names for name in three}) == 8
    assert RequestKeys(_request(), HASHER, salt="salt").depend_on([Medium(b"cat", 5)]) == names[0][:1]


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_embeds": torch.zeros(18, 4)},
        {"pooling_params": PoolingParams()},
        {"resumable": True},
    ],
    ids=["embeddings", "pooling", "streamed input"],
)
def test_what_keys_cannot_tell_apart_is_not_covered(fields: dict[str, Any]) -> None:
    assert RequestKeys.cover(_request())
    assert not RequestKeys.cover(_request(**fields))
