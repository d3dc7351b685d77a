"""API keys: whom they let in, how often, and how many at a time."""

import hashlib
from contextlib import ExitStack
from typing import Any

import pytest

from kvtier.config import parse_config
from kvtier_gateway.http.api_errors import ApiError
from kvtier_gateway.keys import ApiKeys, Client


def config(**tables: Any) -> Any:
    data = {"tenants": {"red": {}, "blue": {}}, "api_keys": tables}
    return parse_config(data, source="k.toml", environ={})


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


class Time:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def refusal(keys: ApiKeys, *headers: str) -> ApiError:
    with pytest.raises(ApiError) as refused:
        keys.client_of(headers)
    assert refused.value.status == 401
    assert refused.value.headers["WWW-Authenticate"] == "Bearer"
    return refused.value


def too_many(client: Client) -> ApiError:
    with pytest.raises(ApiError) as refused, client.admitted():
        pass
    assert refused.value.status == 429
    return refused.value


def test_keys_are_of_tenants_and_end() -> None:
    clock = Time()
    ends = {"sha256": digest("ending"), "expires_at": "1970-01-01T00:20:00Z"}
    keys = ApiKeys(config(a={"tenant": "red", "key_sha256": [digest("key"), ends]}), clock)
    assert (keys.client_of(["Bearer key"]).tenant, keys.client_of(["bearer ending"]).tenant) == ("red", "red")
    clock.now_s = 1200.0
    assert "expired" in str(refusal(keys, "Bearer ending"))
    refusal(keys)
    refusal(keys, "Bearer key", "Bearer key")
    refusal(keys, "Basic key")
    refusal(keys, "Bearer ")
    refusal(keys, "Bearer " + digest("key"))
    refusal(keys, "Bearer " + "k" * 100_000)


def test_a_reload_keeps_what_runs_and_ends_what_is_gone() -> None:
    table = {"tenant": "red", "key_sha256": [digest("key")], "max_concurrent": 1}
    keys = ApiKeys(config(a=table))
    client = keys.client_of(["Bearer key"])
    with client.admitted():
        keys.set(config(a=table | {"tenant": "blue"}, b={"tenant": "red", "key_sha256": [digest("other")]}))
        assert keys.client_of(["Bearer key"]) is client
        assert client.tenant == "blue"
        assert too_many(client).body["error"]["code"] == "concurrency_limit_exceeded"
    with client.admitted():
        keys.set(config(b={"tenant": "red", "key_sha256": [digest("other")]}))
    refusal(keys, "Bearer key")


def test_rates_and_requests_at_a_time() -> None:
    clock = Time()
    table = {"tenant": "red", "key_sha256": [digest("key")], "max_concurrent": 3, "max_requests_per_s": 0.25}
    client = ApiKeys(config(a=table), monotonic=clock).client_of(["Bearer key"])
    with client.admitted():
        refused = too_many(client)
    assert (refused.headers["Retry-After"], refused.body["error"]["type"]) == ("4", "rate_limit_error")
    with ExitStack() as running:
        for _ in range(3):
            clock.now_s += 4
            running.enter_context(client.admitted())
        clock.now_s += 4
        assert "3 requests at a time" in str(too_many(client))
    with client.admitted():
        assert client.num_running == 1
