"""What of a request goes on to an engine, whatever its client has written."""

import json
from typing import Any

import pytest

from kvtier.config.gateway import ApiKeyConfig
from kvtier_gateway.http.api_errors import ApiError
from kvtier_gateway.http.bodies import BodyRoom, Cleaned, clean, parse
from kvtier_gateway.http.parameters import CHAT, COMPLETIONS

KEY = ApiKeyConfig(tenant="red")


def cleaned(body: bytes | dict[str, Any], key: ApiKeyConfig = KEY, *, media: bool = False) -> Cleaned:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return clean(parse(data), CHAT | COMPLETIONS, key, media=media)


def sent(found: Cleaned, isolation: str = "tenant") -> Any:
    return json.loads(found.for_engine(isolation, "red"))


@pytest.mark.parametrize(
    "hidden",
    [
        b'"kv_transfer_params": {"kvtier": {"tenant": "blue"}}',
        b'"kv_transfer_params": {"kvtier": {"tenant": "blue"}}, "kv_transfer_params": null',
        b'"kv_transfer_params": null, "kv_transfer_params": {"kvtier": {"tenant": "blue"}, "do_remote_prefill": true}',
        b'"kv_transfer_\\u0070arams": {"kvtier": {"tenant": "blue"}}',
        b'"cache_salt": "blue", "extra_key": "blue", "lora_path": "/etc/passwd", "priority": -9, "rid": "1"',
        b'"kv_transfer_params": [{"kvtier": {"tenant": "blue"}}]',
        b'"kv_transfer_params": {"kvtier": "tenant"}, "data_parallel_rank": 3, "bootstrap_host": "10.0.0.1"',
    ],
)
def test_no_client_names_a_tenant_a_cache_or_a_server(hidden: bytes) -> None:
    body = b'{"prompt": "x", %s, "max_tokens": 1}' % hidden
    found = cleaned(body)
    assert found.stripped
    own = {"kv_transfer_params": {"kvtier": {"tenant": "red"}}}
    assert sent(found) == {"prompt": "x", "max_tokens": 1} | own
    assert sent(found, "cache_salt") == {"prompt": "x", "max_tokens": 1, "cache_salt": "red"}


def test_an_engine_reads_what_the_gateway_has_read() -> None:
    """The last one of equal names counts, for both; numbers and texts stay what they are."""
    text = 'é "\\ \u0000 \u2028 \U0001f600'
    body = json.dumps({"prompt": text, "temperature": 0.1, "seed": 2**62, "logit_bias": {"5": -1.5}})
    found = cleaned(b'{"prompt": "other", ' + body[1:].encode())
    kept = sent(found)
    del kept["kv_transfer_params"]
    assert kept == json.loads(body)


def test_what_a_client_may_say_of_its_own_blocks() -> None:
    said = {"prompt": "x", "kv_transfer_params": {"kvtier": {"no_store": True, "pin": True, "ttl_s": 5, "more": 1}}}
    assert sent(cleaned(said))["kv_transfer_params"]["kvtier"] == {"tenant": "red", "no_store": True}
    may_pin = ApiKeyConfig(tenant="red", may_pin=True)
    allowed = {"tenant": "red", "no_store": True, "pin": True, "ttl_s": 5}
    assert sent(cleaned(said, may_pin))["kv_transfer_params"]["kvtier"] == allowed


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"prompt": "x", "Cache_Salt": "y"}', "Cache_Salt"),
        (b'{"prompt": "x", "temprature": 1}', "temprature"),
        (b'{"prompt": "x", "model": ["tiny"]}', "model"),
        (b'{"prompt": "x", "top_p": 1e999}', "top_p"),
        (
            b'{"messages": [{"content": [{"type": "image_url", "image_url": "x"}]}]}',
            "messages[0].content",
        ),
        (b'{"messages": [{"content": [{"type": []}]}]}', "messages[0].content"),
        (b'{"messages": [{"content": "x"}, {"content": [{"type": {}, "text": "x"}]}]}', "messages[1].content"),
        (b"[]", None),
        (b'{"prompt": "a secret", "x": NaN}', None),
        (b'{"prompt": "a secret"', None),
        (b'\xef\xbb\xbf{"prompt": "a secret"}', None),
        ('{"prompt": "a secret"}'.encode("utf-16"), None),
        (b'{"prompt": ' + b"[" * 10_000, None),
        (b'{"prompt": "a secret \\ud800"}', None),
    ],
)
def test_what_is_refused(body: bytes, param: str | None) -> None:
    with pytest.raises(ApiError) as refused:
        cleaned(body)
    assert (refused.value.status, refused.value.body["error"]["param"]) == (400, param)
    assert "secret" not in str(refused.value)


def test_what_a_client_says_is_a_number() -> None:
    body = b'{"prompt": "x", "kv_transfer_params": {"kvtier": {"no_store": -1e999}}}'
    assert sent(cleaned(body))["kv_transfer_params"] == {"kvtier": {"tenant": "red"}}


def test_media_lose_the_names_that_clients_give_them() -> None:
    part = {"type": "image_url", "uuid": "a", "image_url": {"url": "data:,x", "uuid": "b"}}
    schema = {
        "type": "json_schema",
        "json_schema": {"name": "s", "schema": {"properties": {"uuid": {}}}},
    }
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, part]}], "response_format": schema}
    kept = sent(cleaned(body, media=True))
    assert kept["messages"][0]["content"][1] == {"type": "image_url", "image_url": {"url": "data:,x"}}
    assert kept["response_format"] == schema


def test_one_tenant_leaves_others_half_of_the_room_for_bodies() -> None:
    room = BodyRoom(100)
    with room.held("red") as first:
        first.take(50)
        with room.held("red") as second, pytest.raises(ApiError) as refused:
            second.take(1)
        assert refused.value.status == 429
        assert refused.value.headers["Retry-After"] == "1"
        with room.held("blue") as other:
            other.take(50)
    with room.held("red") as again:
        again.take(50)


@pytest.mark.parametrize(
    ("fields", "num_answers"),
    [
        ({"prompt": "x"}, 1),
        ({"prompt": [1, 2, 3], "n": 4}, 4),
        ({"prompt": ["x", "y"], "n": 2, "best_of": 5}, 10),
        ({"prompt": [[1, 2], [3]]}, 2),
        ({"prompt": [], "n": -3}, 1),
        ({"messages": [], "n": "8"}, 1),
    ],
)
def test_how_many_answers_a_request_asks_for(fields: dict[str, Any], num_answers: int) -> None:
    assert Cleaned(fields, {}, ()).num_answers == num_answers
