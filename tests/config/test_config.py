"""Configuration: what is accepted, and that every error names file, key and remedy."""

import os
import threading
from pathlib import Path

import pytest

from kvtier.config import Config, bounded_file, load_config, parse_config, token_sha256
from kvtier.config.accepted import accepted_tokens
from kvtier.config.credentials import AcceptedToken, Role
from kvtier.errors import ConfigError

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
        ("pool = 3", ["pool", "a table, and no value", "kvtier config keys"]),
        ("[tenants]\na = 3", ["tenants.a", "a table, and no value"]),
        ("[tenants.red]\nsekret = 'x'", ["tenants.red.sekret", "did you mean 'secret'"]),
        (
            "[tenants.red.memory]\nguarantee_bytes = 1",
            ["red.memory.guarantee_bytes", "did you mean 'guaranteed_bytes'"],
        ),
        ("[host]\ncapacity_bytes = 'much'", ["host.capacity_bytes"]),
        ("[pool]\naddress = 'pool'", ["pool.address", "host:port or unix:/path"]),
        ("[pool]\naddress = 'http://127.0.0.1:7600'", ["pool.address", "host:port or unix:/path"]),
        ("[pool_service]\nlisten = ['pool:http']", ["pool_service.listen.0", "host:port or unix:/path"]),
        ("[pool]\naddress = 'pool..svc:7000'", ["pool.address", "no host can have the name 'pool..svc'"]),
        ("[pool]\naddress = ['a:1', 'grpc:" + "a" * 64 + ".svc:7000']", ["pool.address.1", "1 to 63 characters"]),
        ("[pool_service]\nlisten = ['.svc:0']", ["pool_service.listen.0", "no host can have the name '.svc'"]),
        ("[pool_service]\nhttp_listen = 'pool..svc:0'", ["pool_service.http_listen: address 'pool..svc:0': no host"]),
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
        ("[host]\ncapacity_bytes = true", ["host.capacity_bytes", "neither true nor false", "kvtier config keys"]),
        ("[cache]\ntokens_per_block = true", ["cache.tokens_per_block", "neither true nor false"]),
        ("[pool]\nconnect_timeout_s = true", ["pool.connect_timeout_s", "neither true nor false"]),
        ("[host]\ncapacity_bytes = '\u0663GiB'", ["host.capacity_bytes", "a size such as 4GiB"]),
        ("[host]\ncapacity_bytes = nan", ["host.capacity_bytes: not a size; use", "a size such as 4GiB"]),
        ("[host]\ncapacity_bytes = ''", ["host.capacity_bytes: not a size; use", "a size such as 4GiB"]),
        ("[pool_service]\nmax_pin_s = nan", ["pool_service.max_pin_s: nan, which is no number; set one"]),
        ("[tenants.red.memory]\nweight = -nan", ["tenants.red.memory.weight: nan, which is no number; set one"]),
        ("[host]\ncapacity_bytes = '9EiB'", ["it should be less than or equal to 1152921504606846976; lower it"]),
        ("[api_keys.a]\nkey_sha256 = []", ["api_keys.a.tenant", "set it"]),
        ('[host]\n"a\\nb\\u001b[2J" = 1', ["host.a\\nb\\x1b[2J: unknown key"]),
        ("[api_keys.\"\\u001bc\"]\ntenant = 'x'", ["api_keys.\\x1bc: ", "a-z"]),
        ("[host]\ncapacity_bytes = '1,5GiB'", ["host.capacity_bytes: not a size; use"]),
        ("[host]\ncapacity_bytes = '4GiB;rm'", ["host.capacity_bytes: not a size; use"]),
        (
            "[pool_service]\naudit_log_bytes = '\u0664\u0660\u0669\u0666\u0660'",
            ["pool_service.audit_log_bytes: not a size"],
        ),
        ("[engine]\nnum_threads = true", ["engine.num_threads: neither true nor false"]),
        ("[pool]\nconnect_timeout_s = false", ["pool.connect_timeout_s: neither true nor false"]),
        ("[engine]\nmodel = true", ["engine.model: it is not a valid path"]),
        (
            "[gateway]\nengines = ['http://:sk-plain@127.0.0.1:8000']",
            ["gateway.engines.0.url: ", "http://...@127.0.0.1:8000"],
        ),
        ("[gateway]\nengines = ['http://127.0.0.1:8000/?key=sk-plain']", ["gateway.engines.0.url", "8000/?..."]),
        ("[tracing]\nendpoint = 'u:sk-plain@127.0.0.1:4318'", ["tracing.endpoint: '...@127.0.0.1:4318'"]),
        ("[tracing]\nendpoint = 'http://u:sk-plain@127.0.0.1:4318'", ["OTEL_EXPORTER_OTLP_HEADERS"]),
        ("[pool]\naddress = 'grpc://u:sk-plain@127.0.0.1'", ["pool.address", "//...@127.0.0.1"]),
        ("[pool]\naddress = '\\u001b[31mx'".replace("'", '"'), ["pool.address", "host:port"]),
        ("tenant = 'rde'\n[tenants.'R']\n[tenants.red]\n", ["tenants.R: ", "tenant: 'rde'", "did you mean 'red'"]),
        ("[gateway]\nengine_token = 'sk-plain'", ["gateway.engine_token", "env:NAME", "a secret itself"]),
        ("[pool_service]\nredis_password = 'sk-plain'", ["pool_service.redis_password", "env:NAME"]),
        ("[tenants.red]\ntoken_sha256 = ['sk-plain']", ["tenants.red.token_sha256: not 64", "sha256sum"]),
        ("[tenants.red]\nsealing_keys = 'sk-plain'", ["tenants.red.sealing_keys", "env:NAME"]),
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
        ("[host]\ncapacity_bytes = " + "9" * 5000, ["not valid TOML", "too many digits"]),
        ("tenant = " + "[" * 100_000, ["not valid TOML", "nested too deeply"]),
    ],
)
def test_errors_name_file_key_and_remedy(tmp_path: Path, text: str, parts: list[str]) -> None:
    path = tmp_path / "broken.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(path, {})
    for part in ["broken.toml", *parts]:
        assert part in str(error.value)
    assert "sk-plain" not in str(error.value), "errors never show what may be a secret"
    assert all(char.isprintable() for char in str(error.value).replace("\n", ""))


def test_an_unknown_override_is_an_error(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pool\.adress.*'address'"):
        load_config(path, {**ENVIRON, "KVTIER__POOL__ADRESS": "x"})


def test_a_file_without_end() -> None:
    with pytest.raises(ConfigError, match=r"/dev/zero: cannot read the configuration: .* 16,000,000 bytes"):
        load_config(Path("/dev/zero"), {})


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        load_config(tmp_path / "nowhere.toml", {})


@pytest.mark.parametrize(
    ("section", "field", "value", "message"),
    [
        ("pool_service", "socket_mode", 660, "write them in octal, such as 0o660"),
        ("pool_service", "socket_mode", 440, "write them in octal"),
        ("pool_service", "listen", ["grpc:127.0.0.1:0"], "host:port or unix:/path"),
        ("pool_service", "disk_direct_io", "maybe", "'auto', 'on' or 'off'"),
        ("disk", "direct_io", True, "'auto', 'on' or 'off'"),
        ("pool", "insecure", 3, "pool.insecure: it should be a valid boolean"),
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


def test_paths_are_relative_to_the_file_unless_they_begin_at_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    path = parse_config({}, source="x", folder=tmp_path, environ={}).references.path
    assert path(Path("a/b")) == tmp_path / "a/b"
    assert path(Path("~/.cache/kvtier/models")) == tmp_path / "home/.cache/kvtier/models"


def test_a_file_with_a_byte_order_mark_and_pipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marked, pipe = tmp_path / "marked.toml", tmp_path / "pipe"
    marked.write_bytes(b"\xef\xbb\xbf[host]\ncapacity_bytes = 4096\n")
    assert load_config(marked, {}).host_bytes() == 4096
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(marked.read_bytes(),))
    writer.start()
    assert load_config(pipe, {}).host_bytes() == 4096
    writer.join()
    monkeypatch.setattr(bounded_file, "_MOST_S", 0.05)
    with pytest.raises(ConfigError, match=r"it is a pipe, and nobody has written all of it in 0.05 s; name a file"):
        load_config(pipe, {})
