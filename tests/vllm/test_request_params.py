"""What clients say, well or badly."""

import math
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.request import Request

from kvtier_vllm.requests.params import answer_to, params_of


def _request(table: object) -> Request:
    request = Request("id", [1, 2, 3], SamplingParams(max_tokens=1), None)
    request.kv_transfer_params = {"kvtier": table, "others": 1}
    return request


@pytest.mark.parametrize("params", [None, {}, {"others": {"pin": True}}, "kvtier", ["kvtier"], 7, 1.5])
def test_who_says_nothing_hears_nothing(params: Any) -> None:
    request = _request({})
    request.kv_transfer_params = params
    said = params_of(request, has_pool=True)
    assert (said.no_store, said.pin_s, said.tenant, said.ignored) == (False, 0.0, None, {})
    assert answer_to(said, {"host": 3}) is None


def test_all_that_there_is() -> None:
    said = params_of(_request({"no_store": True, "pin": True, "ttl_s": 60, "tenant": "red"}), has_pool=True)
    assert (said.no_store, said.pin_s, said.tenant) == (True, 60.0, "red")
    assert answer_to(said, {"host": 3}) == {"kvtier": {"loaded_blocks": {"host": 3}}}
    assert params_of(_request({"pin": True}), has_pool=True).pin_s == 3600.0


@pytest.mark.parametrize(
    ("table", "name", "reason"),
    [
        (7, "kvtier", "must be a table"),
        ("pin", "kvtier", "must be a table"),
        ({"pin": True, "ttl": 5}, "ttl", "is not known; there are no_store, pin, ttl_s, tenant"),
        ({"priority": 3}, "priority", "evicts by use"),
        ({"pin": 1}, "pin", "true or false"),
        ({"no_store": "false"}, "no_store", "true or false"),
        ({"ttl_s": 60}, "ttl_s", "there is none"),
        *[
            ({"pin": True, "ttl_s": ttl_s}, "ttl_s", "seconds above 0")
            for ttl_s in (0, -1, math.inf, math.nan, "60", True, 10**400)
        ],
    ],
)
def test_what_cannot_be_used_is_named(table: object, name: str, reason: str) -> None:
    said = params_of(_request(table), has_pool=True)
    assert reason in said.ignored[name]
    assert list(said.ignored) == [name]
    told = answer_to(said, {})
    assert told is not None
    assert told["kvtier"]["ignored"] == dict(said.ignored)
    assert said.pin_s == (3600.0 if "ttl" in str(name) and name == "ttl" else 0.0)


def test_what_is_unclear_is_not_stored() -> None:
    assert params_of(_request({"no_store": "false"}), has_pool=True).no_store


def test_a_tenant_that_is_none_is_named() -> None:
    said = params_of(_request({"tenant": "rde"}), has_pool=True, may_be=lambda tenant: tenant == "red")
    assert said.ignored == {"tenant": "'rde' is no tenant of this engine, so the request uses no cache"}
    assert said.tenant == "rde"


def test_without_a_pool_nothing_is_pinned() -> None:
    said = params_of(_request({"pin": True}), has_pool=False)
    assert (said.pin_s, said.ignored) == (0.0, {"pin": "this engine has no pool"})
