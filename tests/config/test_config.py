"""Configuration: what is accepted, and that every error names file, key and remedy."""

import os
import re
import sys
from pathlib import Path

import pytest

from kvtier.config import Config, load_config, parse_config, token_sha256
from kvtier.config.accepted import accepted_tokens, pool_files, require_clients
from kvtier.config.credentials import AcceptedToken, Role
from kvtier.config.tiers import CacheConfig
from kvtier.config.tls_files import pool_tls
from kvtier.errors import ConfigError
from kvtier.identity.keys import tenant_id

FILE = """
tenant = "red"
[tenants.red]
secret = "env:RED_SECRET"
salt = "v1"
token = "file:red.token"
[tenants.blue]
token_sha256 = ["{blue}"]
[pool]
address = "127.0.0.1:7600"
[host]
capacity_bytes = "256MiB"
"""
ENVIRON = {"RED_SECRET": "0123456789abcdef0123456789abcdef"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "red.token").write_text("red-token\n")
    path = tmp_path / "kvtier.toml"
    path.write_text(FILE.format(blue=token_sha256("blue-token")))
    return path


def test_a_full_file(path: Path) -> None:
    config = load_config(path, ENVIRON)
    assert config.host.capacity_bytes == 256 * 2**20
    assert config.chain_secret("red") == ENVIRON["RED_SECRET"].encode()
    assert config.pool_token("red") == "red-token"
    assert accepted_tokens(config) == [AcceptedToken(token_sha256("blue-token"), Role.TENANT, "blue")]
    with pytest.raises(ValueError, match="frozen"):
        config.pool.address = "elsewhere"  # type: ignore[misc]


def test_an_empty_file_is_all_defaults() -> None:
    config = parse_config({}, source="x", environ={})
    assert config.model_dump() == Config().model_dump()
    assert config.pool.address == []


def test_environment_overrides(path: Path) -> None:
    config = load_config(
        path, {**ENVIRON, "KVTIER__POOL__ADDRESS": "pool:1", "KVTIER__CACHE__TOKENS_PER_BLOCK": "32", "KVTIER_X": "y"}
    )
    assert config.pool.address == ["pool:1"]
    assert config.cache.tokens_per_block == 32


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[pool]\nadress = 'x'", ["pool.adress", "unknown key", "did you mean 'address'"]),
        ("[pol]\naddress = 'x'", ["pol", "unknown key", "'pool'"]),
        ("[tenants.red]\nsekret = 'x'", ["tenants.red.sekret", "did you mean 'secret'"]),
        (
            "[tenants.red.memory]\nguarantee_bytes = 1",
            ["red.memory.guarantee_bytes", "did you mean 'guaranteed_bytes'"],
        ),
        ("[host]\ncapacity_bytes = 'much'", ["host.capacity_bytes"]),
        ("[pool]\naddress = 'pool'", ["pool.address", "host:port or unix:/path"]),
        ("[pool_service]\nlisten = ['pool:http']", ["pool_service.listen.0", "host:port or unix:/path"]),
        ("[pool_service]\nlisten = ['pool:http']", ["pool_service.listen.0: address 'pool:http'"]),
        ("[pool_service]\ngrpc_listen = ['0.0.0.0']", ["pool_service.grpc_listen.0", "host:port or unix:/path"]),
        ("[pool_service]\nhttp_listen = 'all'", ["pool_service.http_listen", "use host:port"]),
        ("[pool_service]\nhttp_listen = ':65536'", ["pool_service.http_listen", "use host:port"]),
        (
            "[pool_service]\nmemory_bytes = -5",
            ["pool_service.memory_bytes", "a size such as 4GiB"],
        ),
        ("[cache]\ntokens_per_block = 0", ["cache.tokens_per_block", "greater than or equal to 1"]),
        ("[cache]\ntokens_per_block = 65537", ["cache.tokens_per_block", "less than or equal to 65536"]),
        ("[cache]\nload_deadline_s = 0", ["cache.load_deadline_s", "greater than 0"]),
        ("tenant = 'rde'\n[tenants.red]\n", ["tenant", "'rde'", "did you mean 'red'"]),
        ("[tenants.'Red Team']\n", ["Red Team", "a-z"]),
        ("[host]\ncapacity_bytes = 1e26", ["host.capacity_bytes"]),
        ("[disk]\nwrite_policy = 'lazy'", ["disk.write_policy", "'write_back'"]),
        ("[pool_service]\nredis_codec = 'zip'", ["pool_service.redis_codec", "'lz4'", "'planes-zstd'"]),
        ("[pool_service]\nredis_codec = 'auto'", ["pool_service.redis_codec", "'auto' was removed", "'raw'", "'lz4'"]),
        ("[pool_service]\ndisk_codec = 'auto'", ["pool_service.disk_codec", "'auto' was removed", "bench codec"]),
        (
            "[pool_service]\ndisk_admission = 'third'",
            ["pool_service.disk_admission", "no admission 'third'"],
        ),
        (
            "[pool_service]\nredis_admission = 'min-run'",
            ["redis_admission", "'min-run': '' is no whole", "min-run:4"],
        ),
        (
            "[disk]\nadmission = 'frequency:99'",
            ["disk.admission", "'99' is no whole number from 1 to 15"],
        ),
        ("[disk]\ncodec = 'auto'", ["disk.codec", "'auto' was removed", "'planes-zstd'"]),
        ("[pool_service]\nredis_ur = 'redis://x'", ["pool_service.redis_ur", "did you mean 'redis_url'"]),
        ("tenant = ", ["not valid TOML", "end of document"]),
    ],
)
def test_errors_name_file_key_and_remedy(tmp_path: Path, text: str, parts: list[str]) -> None:
    path = tmp_path / "broken.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(path, {})
    for part in ["broken.toml", *parts]:
        assert part in str(error.value)


def test_an_unknown_override_is_an_error(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pool\.adress.*'address'"):
        load_config(path, {**ENVIRON, "KVTIER__POOL__ADRESS": "x"})


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        load_config(tmp_path / "nowhere.toml", {})


@pytest.mark.parametrize(
    ("secret", "environ", "message"),
    [
        (None, {}, r"tenants\.red\.secret: missing"),
        ("env:NOPE", {}, r"NOPE is missing or empty"),
        ("env:NOPE", {"NOPE": "  "}, r"NOPE is missing or empty"),
        ("env:SHORT", {"SHORT": "abc"}, r"only 3 bytes"),
        ("file:nope", {}, r"cannot read .*nope"),
        ("file:empty", {}, r"empty is empty"),
        ("plain-secret-in-the-file", {}, r"env:NAME"),
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
    assert "plain-secret" not in str(error.value), "errors never show what may be a secret"


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


@pytest.mark.parametrize(
    ("section", "field", "value", "message"),
    [
        ("pool_service", "socket_mode", 660, "write them in octal, such as 0o660"),
        ("pool_service", "socket_mode", 440, "write them in octal"),
        ("pool_service", "listen", ["grpc:127.0.0.1:0"], "host:port or unix:/path"),
        ("pool_service", "disk_direct_io", "maybe", "'auto', 'on' or 'off'"),
        ("disk", "direct_io", True, "'auto', 'on' or 'off'"),
        ("pool_service", "memory_bytes", "1MB", "pool_service.memory_bytes: .* equal to 1048576"),
        ("pool_service", "disk_bytes", 0, "pool_service.disk_bytes: .* equal to 1048576"),
        ("pool_service", "max_pin_s", -1, "greater than or equal to 0"),
        ("pool_service", "pin_share", 1.1, "less than or equal to 1"),
        ("pool_service", "pin_share", "nan", "pool_service.pin_share"),
        ("pool", "address", "grpc:", "host:port or unix:/path"),
        ("pool", "address", ["unix:/a", "nowhere"], "host:port or unix:/path"),
    ],
)
def test_values_of_the_data_plane_that_are_none(section: str, field: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({section: {field: value}}, source="x", environ={})


def test_one_address_may_stand_for_a_list() -> None:
    config = parse_config({"pool_service": {"listen": "unix:/a", "grpc_listen": "127.0.0.1:1"}}, source="x", environ={})
    assert (config.pool_service.listen, config.pool_service.grpc_listen) == (["unix:/a"], ["127.0.0.1:1"])


def test_a_key_without_a_ca_is_not_ignored() -> None:
    config = parse_config({"pool": {"tls_key": "engine.key"}}, source="x", environ={})
    with pytest.raises(ConfigError, match=r"pool\.tls_key: needs tls_ca"):
        pool_tls(config)


@pytest.mark.parametrize("address", ["pool.example:7600", "10.0.0.7:7600", "[2001:db8::1]:7600", "grpc:0.0.0.0:7601"])
def test_no_engine_sends_its_token_over_a_network_in_the_clear(address: str) -> None:
    """Not even as its second way, which it takes when the Unix socket cannot be had."""
    ways = ["unix:/run/kvtier/pool.sock", "127.0.0.1:7600", "grpc:[::1]:7601", "localhost:7600"]
    assert pool_tls(parse_config({"pool": {"address": ways}}, source="x", environ={})) is None
    exposed = {"address": [*ways, address]}
    config = parse_config({"pool": exposed}, source="x", environ={})
    with pytest.raises(ConfigError, match=re.escape(f"to {address} in the clear")):
        pool_tls(config)
    for allowed in ({"insecure": True}, {"tls_ca": "ca.pem"}):
        pool_tls(parse_config({"pool": exposed | allowed}, source="x", environ={}))


@pytest.mark.parametrize(
    ("pool", "mebibytes"),
    [
        ("", 1024),
        ('[pool]\naddress = "pool.example:7600"\n', 1024),
        ('[pool]\naddress = ["pool.example:7600", "unix:/run/kvtier/pool.sock"]\n', 512),
        ('[pool]\naddress = "unix:/run/kvtier/pool.sock"\n[host]\ncapacity_bytes = "2GiB"\n', 2048),
    ],
    ids=["alone", "a pool elsewhere", "a pool on this host", "as it is set"],
)
def test_host_memory_is_for_staging_beside_a_pool(tmp_path: Path, pool: str, mebibytes: int) -> None:
    path = tmp_path / "kvtier.toml"
    path.write_text(pool)
    assert load_config(path, {}).host_bytes() == mebibytes * 2**20


@pytest.mark.parametrize("platform", ["linux", "darwin"])
@pytest.mark.parametrize(("num_cores", "threads"), [(1, 1), (2, 1), (3, 2), (11, 2), (12, 3), (16, 4), (192, 4)])
def test_transfers_at_a_time_follow_the_cores(
    num_cores: int, threads: int, platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Linux those that the process may use, elsewhere all."""
    monkeypatch.setattr(sys, "platform", platform)
    known = {
        "linux": ("sched_getaffinity", lambda _pid: set(range(num_cores))),
        "darwin": ("cpu_count", lambda: num_cores),
    }
    monkeypatch.setattr(os, *known[platform], raising=False)
    assert CacheConfig().load_threads == threads


@pytest.mark.parametrize(("num_processes", "threads"), [(1, 4), (2, 4), (4, 4), (8, 3), (16, 2), (64, 1)])
def test_ranks_share_the_cores_and_the_host_memory_of_their_engine(
    num_processes: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(os, "cpu_count", lambda: 96)
    left_out = parse_config({}, source="test", environ={}).of_rank(4, num_processes)
    assert left_out.cache.load_threads == threads
    assert left_out.host_bytes() == 1 << 30, "of each rank"
    data = {"cache": {"load_threads": 7}, "host": {"capacity_bytes": "10GiB"}}
    given = parse_config(data, source="test", environ={}).of_rank(4, num_processes)
    assert given.cache.load_threads == 7
    assert given.host_bytes() == 10 * 2**30 // 4


def test_loads_are_verified_on_cuda_alone() -> None:
    def parsed(verify_loads: str, lossy_codec: str = "none") -> Config:
        data = {"cache": {"verify_loads": verify_loads}, "engine": {"lossy_codec": lossy_codec}}
        return parse_config(data, source="k.toml", environ={})

    assert parse_config({}, source="k.toml", environ={}).verifies_on_device("cuda") is False
    assert parsed("host", "int8_per_head").verifies_on_device("cpu") is False
    assert parsed("device").verifies_on_device("cuda") is True
    with pytest.raises(ConfigError, match=r'k.toml: cache.verify_loads: "device", but KV is on cpu; set it to "host"'):
        parsed("device").verifies_on_device("cpu")
    with pytest.raises(ConfigError, match=r"cache.verify_loads: .* engine.lossy_codec changes them"):
        parsed("device", "int8_per_head").verifies_on_device("cuda")
    with pytest.raises(ConfigError, match=r"cache.verify_loads"):
        parsed("both")


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
