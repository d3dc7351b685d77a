"""Requests without an engine: of tokens alone, in blocks of `SIZE`, for those that decide what is loaded and saved."""

from collections.abc import Sequence
from typing import Any

from vllm import SamplingParams
from vllm.v1.request import Request

from kvtier.identity.keys import BlockHasher, PrefixHasher, tenant_id
from kvtier_vllm.requests.keys import RequestKeys
from kvtier_vllm.requests.known_requests import KnownRequest
from kvtier_vllm.requests.params import params_of
from kvtier_vllm.requests.traces import RequestTrace

SIZE = 4
HASHER = BlockHasher(tenant_id("red"), PrefixHasher(b"sixteen bytes of", "", SIZE))


def known_request(tokens: Sequence[int], params: dict[str, Any] | None = None) -> KnownRequest:
    """:param params: what its client says, as `kv_transfer_params`."""
    request = Request("id", list(tokens), SamplingParams(max_tokens=64), None)
    request.kv_transfer_params = params
    return KnownRequest(
        request, RequestKeys(request, HASHER, salt=None), params_of(request, has_pool=False), RequestTrace(None)
    )
