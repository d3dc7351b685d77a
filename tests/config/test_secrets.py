"""Secrets that a configuration names: where they come from, and what is said of those that cannot be had."""

from pathlib import Path

import pytest

from kvtier.config import Config, load_config, parse_config
from kvtier.errors import ConfigError
from kvtier.identity.keys import tenant_id


@pytest.mark.parametrize(
    ("secret", "environ", "message"),
    [
        (None, {}, r"tenants\.red\.secret: missing"),
        ("env:NOPE", {}, r"NOPE is missing or empty"),
        ("env:NOPE", {"NOPE": "  "}, r"NOPE is missing or empty"),
        ("env:SHORT", {"SHORT": "abc"}, r"only 3 bytes"),
        ("file:nope", {}, r"cannot read .*nope"),
        ("file:empty", {}, r"empty is empty"),
    ],
)
def test_a_secret_that_is_missing_or_empty(
    tmp_path: Path, secret: str | None, environ: dict[str, str], message: str
) -> None:
    (tmp_path / "empty").write_text("\n")
    tenant = {} if secret is None else {"secret": secret}
    config = parse_config(
        {"tenant": "red", "tenants": {"red": tenant}}, source="k.toml", folder=tmp_path, environ=environ
    )
    with pytest.raises(ConfigError, match=message) as error:
        config.chain_secret("red")
    assert "k.toml: tenants.red.secret" in str(error.value)


_AT = "retire_at = 2027-01-31T00:00:00Z"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"[{{secret = 'env:NOW', {_AT}}}]", r"previous_secrets\[0\]: the same as the secret"),
        (
            f"[{{secret = 'env:A', {_AT}}}, {{secret = 'env:A2', {_AT}}}]",
            r"previous_secrets\[1\]: the same as previous_secrets\[0\]",
        ),
        ("[{secret = 'env:A', retire_at = 2027-01-31T00:00:00}]", r"previous_secrets\.0\.retire_at.*timezone"),
        ("[{secret = 'env:A'}]", r"previous_secrets\.0\.retire_at.*required"),
        (f"[{', '.join([f'{{secret = %env:A%, {_AT}}}'] * 5)}]".replace("%", "'"), r"previous_secrets: .*at most 4"),
        (f"[{{secret = 'env:SHORT', {_AT}}}]", r"previous_secrets\[0\]: only 5 bytes"),
        (f"[{{secret = 'env:GONE', {_AT}}}]", r"previous_secrets\[0\]: environment variable GONE is missing"),
    ],
)
def test_previous_secrets_that_cannot_be(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "k.toml").write_text(f'[tenants.red]\nsecret = "env:NOW"\nprevious_secrets = {text}\n')
    environ = {"NOW": "n" * 32, "A": "a" * 32, "A2": "a" * 32, "SHORT": "short"}
    with pytest.raises(ConfigError, match=said) as error:
        load_config(tmp_path / "k.toml", environ).previous_secrets("red")
    assert not any(secret in str(error.value) for secret in environ.values() if len(secret) > 5)


def test_previous_secrets_are_the_files_in_their_order(tmp_path: Path) -> None:
    (tmp_path / "k.toml").write_text(
        '[tenants.red]\nsecret = "env:NOW"\nprevious_secrets = [\n'
        '  {secret = "env:A", retire_at = 2027-01-01T00:00:00Z},\n'
        '  {secret = "file:b", retire_at = 2020-01-01T01:00:00+01:00},\n]\n'
    )
    (tmp_path / "b").write_text("b" * 16)
    config = load_config(tmp_path / "k.toml", {"NOW": "n" * 32, "A": "a" * 32})
    assert config.previous_secrets("red") == [(b"a" * 32, 1_798_761_600.0), (b"b" * 16, 1_577_836_800.0)]


def test_the_password_of_the_redis_comes_from_elsewhere() -> None:
    def config(reference: str) -> Config:
        return parse_config(
            {"pool_service": {"redis_password": reference}}, source="k.toml", environ={"REDIS_PASSWORD": "hush"}
        )

    assert config("env:REDIS_PASSWORD").redis_password() == "hush"
    assert Config().redis_password() is None
    with pytest.raises(ConfigError, match=r"k\.toml: pool_service\.redis_password: use .env:NAME.") as error:
        config("hush").redis_password()
    assert "hush" not in str(error.value)


def test_storage_keys_are_those_of_the_tenants_that_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"1:{'11' * 32}\n2:{'22' * 32}\n")
    tenants = {
        "red": {"storage_keys": "file:keys", "storage_reads_plain": True},
        "blue": {"storage_keys": "env:ABSENT"},
        "green": {},
    }
    config = parse_config({"tenants": tenants}, source="test.toml", folder=tmp_path, environ={})
    seals = config.storage_seals(["red", "green"]).by_tenant
    assert {tenant: (seal.keys.newest, seal.reads_plain) for tenant, seal in seals.items()} == {
        tenant_id("red"): (2, True)
    }
    with pytest.raises(ConfigError, match=r"test\.toml: tenants\.blue\.storage_keys: .*ABSENT is missing"):
        config.storage_seals(["blue"])
