"""`kvtier config`: who has set a key, the file or a variable of the environment, and what is shown of it."""

import json
from pathlib import Path

import pytest

from config_command_rig import SECRETS, findings, run
from kvtier.config import load_config
from kvtier.errors import ConfigError

CREDENTIALS = (
    "redis://u:never-shown@h:1/0",
    "redis:/u:never-shown@h",
    "redis:u:never-shown",
    "u:never-shown@h:6379",
    "redis://u:never-shown",
    "redis://h,u:never-shown",
    "redis://u:never-shown%40h:1/0",
    "redis://u:1#never-shown@h:1",
    "redis+sentinel://u:never-shown@h:1/s",
    "unix://u:never-shown@h/x",
    "redis://u:never-shown\u2100@h:1",
)


def test_an_error_of_the_environment_names_the_variable(tmp_path: Path) -> None:
    file = tmp_path / "kvtier.toml"
    file.write_text("[pool_service]\nmemory_bytes = '1GiB'\n")
    for variable, part in (
        ("POOL_SERVICE__MEMORY_BYTES", "not a size; use a number of bytes"),
        ("POOL_SERVICE__MEMROY_BYTES", "did you mean 'memory_bytes'"),
        ("HOTS__CAPACITY_BYTES", "hots: unknown key; did you mean 'host'"),
        ("TENANTS__RED__MEMRY__CAP_BYTES", "did you mean 'memory'"),
        ("API_KEYS__ALICE__MAY_PIN", "api_keys.alice.tenant: Field required"),
        ("A__B", "a: unknown key"),
        ("", "names no key; name one as in KVTIER__HOST__CAPACITY_BYTES"),
        ("HOST____POLICY", "names no key"),
    ):
        with pytest.raises(ConfigError) as raised:
            load_config(file, {f"KVTIER__{variable}": "banana"})
        first = str(raised.value).splitlines()[0]
        assert first.startswith(f"environment variable KVTIER__{variable}: ")
        assert part in first
    file.write_text("tenant = 'red'\n[tenants.red]\nsecret = 'env:NOWHERE'\n")
    for variable, said in (
        ("TENANTS__RED__SECRET__FOO", "tenants.red.secret: it should be a valid string"),
        ("TENANT", "tenant: 'banana' has no table; valid: red"),
        ("tenant", "tenant: 'banana' has no table; valid: red"),
        ("TENANTS__A__SECRET", "tenants.a.secret: "),
        ("GATEWAY_TENANTS", "gateway_tenants: 'banana' has no table; valid: red"),
    ):
        with pytest.raises(ConfigError) as raised:
            load_config(file, {f"KVTIER__{variable}": '["banana"]' if "GATEWAY" in variable else "banana"})
        assert str(raised.value).startswith(f"environment variable KVTIER__{variable}: {said}")
    file.write_text("")
    key, table = "KVTIER__HOST__CAPACITY_BYTES", "KVTIER__HOST"
    for environ in ({key: "lots", table: "{}"}, {table: "{}", key: "lots"}):
        with pytest.raises(ConfigError, match=rf"^environment variable {key}: host.capacity_bytes: not a size"):
            load_config(file, environ)
    file.write_text("[hots]\ncapacity_bytes = 1\n")
    with pytest.raises(ConfigError, match=rf"^{file}: hots: unknown key"):
        load_config(file, {"KVTIER__HOTS__CAPACITY_BYTES": "1"})


def test_show_says_who_has_set_what(tmp_path: Path) -> None:
    file = tmp_path / "kvtier.toml"
    file.write_text("[pool_service]\nmemory_bytes = '1GiB'\nredis_password = 'env:NEVER_SHOWN'\n")
    done = run("show", str(file), "--json", KVTIER__HOST__POLICY="lfu", NEVER_SHOWN="hidden")
    settings = {found["key"]: (found["value"], found["source"]) for found in json.loads(done.stdout)["settings"]}
    assert settings == {
        "host.policy": ("lfu", "KVTIER__HOST__POLICY"),
        "pool_service.memory_bytes": (2**30, str(file)),
        "pool_service.redis_password": ("env:NEVER_SHOWN", str(file)),
    }
    everything = json.loads(run("show", str(file), "--all", "--json").stdout)["settings"]
    assert {"key": "cache.tokens_per_block", "value": 16, "source": "default"} in everything


def test_show_prints_no_secret_and_no_control_characters(tmp_path: Path) -> None:
    file = tmp_path / "kvtier.toml"
    file.write_text("[tenants.red]\nsecret = 'never shown'\n")
    done = run("show", str(file))
    assert (done.returncode, "env:NAME" in done.stderr, "never shown" in done.stdout + done.stderr) == (1, True, False)
    file.write_text('[pool_service]\nredis_url = "redis://h:1/0?password=never-shown"\n')
    assert run("show", str(file)).stdout.startswith('pool_service.redis_url = "redis://h:1/0?..."')
    for key, url in (
        *(("pool_service.redis_url", url) for url in CREDENTIALS),
        ("tracing.endpoint", "http://u:never-shown"),
        ("tracing.endpoint", "http://u:never-shown%40h:1"),
        ("tracing.endpoint", "http://h:1#never-shown"),
    ):
        table, _, name = key.partition(".")
        file.write_text(f'[{table}]\n{name} = "{url}"\n')
        for done in (run("show", str(file)), run("check", str(file))):
            said = done.stdout + done.stderr
            assert (done.returncode, key in said, "never-shown" in said) == (1, True, False), said
    file.write_text('[engine.adapters."a\\u001bc"]\npath = "x"\n')
    shown = run("show", str(file)).stdout
    assert "engine.adapters.a\\x1bc.path" in shown


@pytest.mark.parametrize(
    ("variable", "key"),
    [
        ("KVTIER_POOL_ADDRESS", "pool.address"),
        ("KVTIER_POOL__ADDRESS", "pool.address"),
        ("kvtier__pool__address", "pool.address"),
        ("KVTIER_HOST_CAPACITY_BYTES", "host.capacity_bytes"),
        ("KVTIER_POOL_ADRESS", "pool.address"),
        ("KVTIER_TENANT", "tenant"),
        ("KVTIER_TENANTS_DEFAULT_SALT", "tenants.default.salt"),
    ],
)
def test_a_variable_that_nearly_names_a_key(variable: str, key: str, tmp_path: Path) -> None:
    file = tmp_path / "kvtier.toml"
    assert run("init", "engine", "--output", str(file)).returncode == 0
    code, found = findings(file, **SECRETS, **{variable: "127.0.0.1:1"})
    (text,) = [each["text"] for each in found if each["key"] == key and "variable" in each["text"]]
    meant = f"KVTIER__{key.replace('.', '__').upper()}"
    assert (code, text) == (0, f"the variable {variable} does not set it; {meant} would")


def test_variables_of_ones_own(tmp_path: Path) -> None:
    """Variables that the file refers to, and others that name no key, are told of by nobody."""
    file = tmp_path / "kvtier.toml"
    text = run("init", "engine").stdout.replace("env:KVTIER_SECRET", "env:KVTIER_POOL_ADDRESS")
    file.write_text(text)
    own = {"KVTIER_POOL_ADDRESS": "s" * 32, "KVTIER_HOME": "x", "KVTIER_TENANT_DEFAULT_TOKEN": "x"}
    code, found = findings(file, **SECRETS, **own)
    assert (code, [each["text"] for each in found if "variable" in each["text"]]) == (0, [])
