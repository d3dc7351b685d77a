"""Several tenants of one served engine, by API keys over TLS and as a gateway names them, above a real pool."""

import datetime
import hashlib
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from adapter_rig import random_adapter
from cache_pool import TOKENS, CachePool
from certificates import Authority
from engine_process import CONFIG, NO_KEEP_ALIVE, PATIENCE_S, EngineProcess, engine_process
from kvtier.config import parse_config
from kvtier.config.accepted import accepted_engine_keys
from kvtier.errors import ConfigError

MODEL = "SmolLM2-135M-Instruct.Q4_1"
PROMPT = "Our fleet: " + " ".join(f"ship {i} carries {7 * i % 31} crates;" for i in range(12))
KEYS = {name: f"an API key of {name}, long enough" for name in ("red", "blue", "gone")}
PATIENT = {
    "KVTIER__CACHE__FETCH": "always",
    "KVTIER__CACHE__LOOKUP_DEADLINE_S": "30",
    "KVTIER__CACHE__LOAD_DEADLINE_S": "30",
    "KVTIER__POOL__CONNECT_TIMEOUT_S": "30",
    "KVTIER__POOL__CALL_TIMEOUT_S": "30",
    "KVTIER__ENGINE__NUM_THREADS": "1",
    "BLUE_SECRET": "another secret of more than sixteen bytes",
    "RED_TOKEN": TOKENS["red"],
    "BLUE_TOKEN": TOKENS["blue"],
}


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def configured(pool: CachePool, *, head: str, keys: str = "", engine: str = "") -> str:
    engine_and_host = CONFIG[CONFIG.index("[engine]\n") + len("[engine]\n") :]
    return (
        f'{head}\n[tenants.red]\nsecret = "env:RED_SECRET"\ntoken = "env:RED_TOKEN"\n'
        f'[tenants.blue]\nsecret = "env:BLUE_SECRET"\ntoken = "env:BLUE_TOKEN"\n{keys}\n'
        f'[pool]\naddress = "{pool.address}"\n[engine]\n{engine}\n{engine_and_host}'
    )


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CachePool]:
    with CachePool(tmp_path_factory.mktemp("pool"), TOKENS) as running:
        yield running


def cached(answer: dict[str, Any]) -> dict[str, int]:
    by_tier: dict[str, int] = answer["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]
    return {tier: count for tier, count in by_tier.items() if count}


def test_keys_and_gateways_name_tenants_that_share_nothing(pool: CachePool, tmp_path: Path) -> None:
    ca = Authority(tmp_path)
    pair = ca.issue("server", "127.0.0.1")
    ended = (datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)).isoformat()
    gone = f'{{sha256 = "{digest(KEYS["gone"])}", expires_at = "{ended}"}}'
    config = (
        configured(
            pool,
            head="",
            keys=f'''
[api_keys.alice]
tenant = "red"
key_sha256 = ["{digest(KEYS["red"])}", {gone}]
[api_keys.bob]
tenant = "blue"
key_sha256 = ["{digest(KEYS["blue"])}"]
''',
            engine=f'tls_certificate = "{pair.certificate}"\ntls_key = "{pair.key}"',
        )
        .replace("{sha256", "{{sha256")
        .replace('"}', '"}}')
    )
    with engine_process(tmp_path, config=config, ca=ca.certificate, **PATIENT) as engine:
        assert engine.client.base_url.scheme == "https"
        _strangers_are_turned_away(engine)
        num_tokens = _tenants_share_nothing(engine)
        _renewed_certificates_count(engine, tmp_path)
    pool.await_written(2 * (num_tokens // 16))
    _a_gateway_names_them(pool, tmp_path, num_tokens)


def _ask(engine: EngineProcess, key: str | None, **body: Any) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    body = {"prompt": PROMPT, "max_tokens": 17, "temperature": 0, **body}
    return engine.client.post("/v1/completions", json=body, headers=headers)


def _strangers_are_turned_away(engine: EngineProcess) -> None:
    for key in (None, "short", KEYS["red"] + "x", KEYS["red"].upper(), KEYS["gone"]):
        response = _ask(engine, key)
        assert response.status_code == 401
        assert response.headers["WWW-Authenticate"] == "Bearer"
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert "X-Request-Id" in response.headers
    assert engine.client.get("/v1/models").status_code == 401
    assert engine.client.post("/v1/cache/reset").status_code == 401
    assert engine.client.get("/health").status_code == 200


def _tenants_share_nothing(engine: EngineProcess) -> int:
    answers = [_ask(engine, KEYS[name]).json() for name in ("red", "blue", "red", "blue")]
    num_tokens: int = answers[0]["usage"]["prompt_tokens"]
    assert [cached(answer) for answer in answers] == [{}, {}, {"device": num_tokens - 1}, {"device": num_tokens - 1}]
    assert len({tuple(answer["kvtier"]["token_ids"]) for answer in answers}) == 1
    headers = {"Authorization": f"Bearer {KEYS['red']}"}
    assert engine.client.get("/v1/models", headers=headers).status_code == 200
    named = _ask(engine, KEYS["blue"], kv_transfer_params={"kvtier": {"tenant": "red"}})
    assert (named.status_code, named.json()["error"]["param"]) == (400, "kv_transfer_params.kvtier.tenant")
    assert engine.client.post("/v1/cache/reset", headers=headers).status_code == 403
    official = openai.OpenAI(base_url=f"{engine.client.base_url}/v1", api_key=KEYS["blue"], http_client=engine.client)
    answer = official.completions.create(model=MODEL, prompt=PROMPT, max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == num_tokens - 1
    return num_tokens


def _renewed_certificates_count(engine: EngineProcess, folder: Path) -> None:
    other = Authority(folder, "other")
    url = str(engine.client.base_url)
    with httpx.Client(verify=ssl.create_default_context(cafile=other.certificate), limits=NO_KEEP_ALIVE) as client:
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            client.get(f"{url}/health", timeout=PATIENCE_S)
        other.issue("server", "127.0.0.1")
        assert client.get(f"{url}/health", timeout=PATIENCE_S).status_code == 200


def _a_gateway_names_them(pool: CachePool, folder: Path, num_tokens: int) -> None:
    loud = random_adapter(folder / "loud")
    adapters = f'adapters = {{{{ loud = {{{{ path = "{loud}" }}}} }}}}'
    config = configured(pool, head='gateway_tenants = ["red", "blue"]', engine=adapters)
    with engine_process(folder, config=config, **PATIENT) as engine:
        as_red, as_blue = ({"kvtier": {"tenant": name}} for name in ("red", "blue"))
        first = cached(_ask(engine, None, kv_transfer_params=as_red).json())
        assert first == {"pool": (num_tokens - 1) // 16 * 16}
        assert cached(_ask(engine, None, kv_transfer_params=as_red).json()) == {"device": num_tokens - 1}
        _adapters_share_nothing_either(engine, as_red, num_tokens)
        longer = PROMPT + " The end."
        assert cached(_ask(engine, None, prompt=longer, kv_transfer_params=as_blue).json())["pool"] > 0
        assert [cached(_ask(engine, None, kv_transfer_params=params).json()) for params in (None, {})] == [{}, {}]
        response = _ask(engine, None, kv_transfer_params={"kvtier": {"tenant": "green"}})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "kv_transfer_params.kvtier.tenant")
        assert _ask(engine, None, kv_transfer_params={"kvtier": {"no_store": True}}).status_code == 400
        assert engine.client.post("/v1/cache/reset").status_code == 200


def _adapters_share_nothing_either(engine: EngineProcess, as_red: dict[str, Any], num_tokens: int) -> None:
    plain, first, second = (
        _ask(engine, None, model=model, kv_transfer_params=as_red).json() for model in (MODEL, "loud", "loud")
    )
    assert [cached(answer) for answer in (plain, first, second)] == [
        {"device": num_tokens - 1},
        {},
        {"device": num_tokens - 1},
    ]
    assert second["model"] == "loud"
    assert first["kvtier"]["token_ids"] == second["kvtier"]["token_ids"] != plain["kvtier"]["token_ids"]
    assert [model["id"] for model in engine.client.get("/v1/models").json()["data"]] == [plain["model"], "loud"]


def test_whose_requests_are_is_said_in_one_way() -> None:
    keys: dict[str, object] = {"alice": {"tenant": "red", "key_sha256": [digest(KEYS["red"])]}}
    tenants: dict[str, object] = {"red": {}, "blue": {}}
    config = parse_config({"tenants": tenants, "api_keys": keys}, source="k.toml", environ={})
    assert config.engine_tenants() == ["red"]
    assert [key.name for key in accepted_engine_keys(config)] == ["red"]
    with pytest.raises(ConfigError, match=r"tenant: missing; only `kvtier engine` knows tenants by \[api_keys\.\*\]"):
        config.only_tenant()
    behind = {"gateway_tenants": ["blue"], "tenants": tenants, "api_keys": keys}
    config = parse_config(behind, source="k.toml", environ={})
    assert (config.engine_tenants(), accepted_engine_keys(config)) == (["blue"], []), "they are the gateway's clients"
    keys["bob"] = {"tenant": "blue", "key_sha256": [digest(KEYS["red"])]}
    twice = parse_config({"tenants": tenants, "api_keys": keys}, source="k.toml", environ={})
    with pytest.raises(ConfigError, match=r"api_keys\.bob\.key_sha256: the same .* 'red'"):
        accepted_engine_keys(twice)
