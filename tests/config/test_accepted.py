"""Whom a configuration lets in, and whose blocks an engine has."""

from pathlib import Path

import pytest

from kvtier.config import load_config, parse_config, token_sha256
from kvtier.config.accepted import accepted_tokens, pool_files, require_clients
from kvtier.config.credentials import AcceptedToken, Role
from kvtier.errors import ConfigError


@pytest.mark.parametrize("nothing", ["", "\n"])
def test_the_digest_of_no_token_is_refused(nothing: str) -> None:
    table = {"red": {"token_sha256": [token_sha256(nothing)]}}
    with pytest.raises(ConfigError, match=r"tenants\.red\.token_sha256: the digest of an empty token"):
        accepted_tokens(parse_config({"tenants": table}, source="x", environ={}))


def test_tenants_must_not_share_a_token() -> None:
    digest = token_sha256("same")
    tenants = {"red": {"token_sha256": [digest]}, "blue": {"token_sha256": [digest]}}
    with pytest.raises(ConfigError, match="the same token"):
        accepted_tokens(parse_config({"tenants": tenants}, source="k.toml", environ={}))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[{sha256 = '0', expires = 1}]", ["tenants.red.token_sha256.0.expires", "did you mean 'expires_at'"]),
        ("[{sha256 = '0', expires_at = 2027-01-01T00:00:00}]", ["tenants.red.token_sha256.0.expires_at", "timezone"]),
        ("[{expires_at = 2027-01-01T00:00:00Z}]", ["tenants.red.token_sha256.0.sha256", "required"]),
        ("[7]", ["tenants.red.token_sha256.0"]),
    ],
)
def test_what_is_wrong_with_a_token_is_said_of_its_entry(tmp_path: Path, text: str, parts: list[str]) -> None:
    (tmp_path / "k.toml").write_text(f"[tenants.red]\ntoken_sha256 = {text}\n")
    with pytest.raises(ConfigError) as error:
        load_config(tmp_path / "k.toml", {})
    for part in parts:
        assert part in str(error.value).lower()


def test_tokens_of_all_roles(tmp_path: Path) -> None:
    one, two, three, four = map(token_sha256, "abcd")
    (tmp_path / "k.toml").write_text(
        f'[tenants.red]\ntoken_sha256 = ["{one}", {{sha256 = "{two}", expires_at = 2027-01-01T00:00:00Z}}]\n'
        f'[operators.ann]\ntoken_sha256 = ["file:ann"]\n[observers.bob]\ntoken_sha256 = ["{four}"]\n'
    )
    (tmp_path / "ann").write_text(three)
    config = load_config(tmp_path / "k.toml", {})
    assert accepted_tokens(config) == [
        AcceptedToken(one, Role.TENANT, "red"),
        AcceptedToken(two, Role.TENANT, "red", 1_798_761_600.0),
        AcceptedToken(three, Role.OPERATOR, "ann"),
        AcceptedToken(four, Role.OBSERVER, "bob"),
    ]
    assert pool_files(config) == [tmp_path / "k.toml", tmp_path / "ann"]


def test_no_two_roles_share_a_token(tmp_path: Path) -> None:
    digest = token_sha256("same")
    (tmp_path / "k.toml").write_text(
        f'[tenants.a]\ntoken_sha256 = ["{digest}"]\n[operators.a]\ntoken_sha256 = ["{digest}"]\n'
    )
    with pytest.raises(ConfigError, match=r"operators\.a\.token_sha256: the same token as tenant 'a'"):
        accepted_tokens(load_config(tmp_path / "k.toml", {}))


def test_an_engine_needs_a_tenant() -> None:
    with pytest.raises(ConfigError, match=r"k\.toml: tenant: missing"):
        parse_config({}, source="k.toml", environ={}).engine_tenants()


def test_tenants_of_a_gateway() -> None:
    tenants: dict[str, object] = {"red": {}, "blue": {}, "green": {}}
    data = {"tenant": "red", "gateway_tenants": ["blue", "red"], "tenants": tenants}
    config = parse_config(data, source="k.toml", environ={})
    assert config.engine_tenants() == ["red", "blue"]
    with pytest.raises(ConfigError, match="gateway_tenants: only kvtier's own engine and vLLM"):
        config.only_tenant()
    assert parse_config({**data, "tenant": None}, source="k.toml", environ={}).engine_tenants() == ["blue", "red"]
    with pytest.raises(ConfigError, match=r"gateway_tenants: 'blu' has no table; .*blue"):
        parse_config({**data, "gateway_tenants": ["blu"]}, source="k.toml", environ={})


def test_a_pool_needs_a_token() -> None:
    with pytest.raises(ConfigError, match="nobody could use the pool"):
        require_clients(parse_config({"tenants": {"red": {}}}, source="k.toml", environ={}))
