"""What `kvtier pool serve` makes of a file and its options."""

from pathlib import Path

import pytest

from kvtier.config import Config, token_sha256
from kvtier.config.accepted import accepted_tokens
from kvtier.config.tls_files import pool_service_tls
from kvtier.errors import ConfigError
from kvtier_pool.cli import configured
from kvtier_pool.limits import PoolLimits
from kvtier_pool.startable import require_redis_address

RED, BLUE = token_sha256("red-token"), token_sha256("blue-token")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "pool.toml"
    path.write_text(f"""
        [tenants.red]
        token_sha256 = ["{RED}"]
        [pool_service]
        memory_bytes = "2MiB"
        disk_dir = "blocks"
        tls_certificate = "pool.pem"
        tls_key = "pool.key"
        redis_password = "file:password"
    """)
    (tmp_path / "password").write_text("hush")
    return path


def disk_dir(config: Config) -> Path:
    assert config.pool_service.disk_dir is not None
    return config.references.path(config.pool_service.disk_dir)


def test_options_win_over_the_file_and_the_environment(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER__POOL_SERVICE__NUM_THREADS", "7")
    monkeypatch.setenv("KVTIER__POOL_SERVICE__MEMORY_BYTES", "3MiB")
    config = configured(path, {"memory_bytes": "4MiB"}, [])
    assert (config.pool_service.memory_bytes, config.pool_service.num_threads) == (4 << 20, 7)
    assert [(token.digest, token.name) for token in accepted_tokens(config)] == [(RED, "red")]
    assert config.redis_password() == "hush", "from a file beside that of the configuration"


def test_paths_are_relative_to_where_they_are_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = path.parent / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert disk_dir(configured(path, {}, [])) == path.parent / "blocks"
    config = configured(path, {"disk_dir": Path("here"), "tls_key": Path("/etc/pool.key")}, [])
    assert disk_dir(config) == elsewhere / "here"
    files = pool_service_tls(config)
    assert files is not None
    assert (files.certificate, files.key) == (path.parent / "pool.pem", Path("/etc/pool.key"))


def test_tenants_of_the_command_line_replace_those_of_the_file(path: Path) -> None:
    tokens = accepted_tokens(configured(path, {}, [f"blue={BLUE}"]))
    assert [(token.digest, token.name) for token in tokens] == [(BLUE, "blue")]


@pytest.mark.parametrize(
    ("flags", "tenants", "message"),
    [
        ({"memory_bytes": "1KiB"}, [], "command line: pool_service.memory_bytes: .* equal to 1048576"),
        ({}, ["blue=abc"], "command line: tenants.blue.token_sha256: not 64 lower-case hex digits"),
        ({}, ["blue"], "--tenant blue: use NAME=SHA256"),
    ],
)
def test_what_is_wrong_with_options_is_said_of_them(
    path: Path, flags: dict[str, str], tenants: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        configured(path, flags, tenants)


def test_what_is_found_later_to_be_wrong_with_options_is_said_of_them_too(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^command line: pool_service\.redis_url: .*http"):
        require_redis_address(configured(path, {"redis_url": "http://x"}, []))


def test_streams_of_events_leave_threads_to_calls() -> None:
    num_streams = PoolLimits().max_event_streams
    assert configured(None, {"num_threads": num_streams + 1}, []).pool_service.num_threads == num_streams + 1
    with pytest.raises(ConfigError, match=f"pool_service.num_threads: .* equal to {num_streams + 1}"):
        configured(None, {"num_threads": num_streams}, [])
