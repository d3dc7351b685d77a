"""How users configure the connector, and what they are told when it cannot work like that."""

from pathlib import Path
from typing import Any

import pytest
from engine_lab import EngineError, Lab
from vllm_rig import settings, transfer

from kvtier.errors import ConfigError
from kvtier_vllm.settings import load_settings, of_worker

FILE = """
tenant = "red"
[tenants.red]
secret = "file:secret"
[host]
capacity_bytes = "64MiB"
write_policy = "write_through_selective"
"""


def test_inline_keys_win_over_the_file_key_by_key(tmp_path: Path) -> None:
    (tmp_path / "kvtier.toml").write_text(FILE)
    (tmp_path / "secret").write_text("a secret of more than sixteen bytes")
    config = load_settings({"config": str(tmp_path / "kvtier.toml"), "host": {"capacity_bytes": "32MiB"}}, 32)
    assert int(config.host.capacity_bytes) == 32 << 20
    assert config.host.write_policy == "write_through_selective"
    assert config.cache.tokens_per_block == 32
    assert config.chain_secret("red") == b"a secret of more than sixteen bytes", "relative to the file"


def test_without_a_file_all_is_inline() -> None:
    config = load_settings(settings(), 64)
    assert (config.tenant, config.cache.tokens_per_block) == ("red", 64)


def test_workers_have_disk_folders_of_their_own() -> None:
    config = load_settings(settings(disk={"directory": "/kv"}), 32)
    folders = [of_worker(config, name).disk.directory for name in ("0-0", "0-1", "1-0")]
    assert folders == [Path("/kv/0-0"), Path("/kv/0-1"), Path("/kv/1-0")]
    assert of_worker(load_settings(settings(), 32), "0-0").disk.directory is None


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ({"config": "/nowhere/kvtier.toml"}, ["kv_connector_extra_config.config", "/nowhere/kvtier.toml"]),
        ({"config": 5}, ["kv_connector_extra_config.config", "path"]),
        (settings() | {"cache": "fast"}, ["kv_connector_extra_config: cache"]),
        (settings(cache={"tokens_per_block": 16}), ["cache.tokens_per_block", "--block-size"]),
        (settings(disk={"write_policy": "write_back"}), ["disk.write_policy", "write_through"]),
        (settings(hots={}), ["hots", "did you mean 'host'"]),
        (settings(host={"capacity": 1}), ["host.capacity", "did you mean 'capacity_bytes'"]),
        (settings() | {"tenant": "blue"}, ["tenant", "'blue' has no table"]),
    ],
    ids=[
        "no file",
        "no path",
        "no table",
        "block size",
        "write policy",
        "unknown table",
        "unknown key",
        "unknown tenant",
    ],
)
def test_errors_name_key_and_remedy(extra: dict[str, Any], told: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load_settings(extra, 32)
    for words in told:
        assert words in str(error.value)


def test_the_environment_does_not_say_how_long_blocks_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of half a block's tokens would find blocks that go on with other ones."""
    monkeypatch.setenv("KVTIER__CACHE__TOKENS_PER_BLOCK", "16")
    with pytest.raises(ConfigError, match="KVTIER__CACHE__TOKENS_PER_BLOCK"):
        load_settings(settings(), 32)


def test_a_file_that_is_no_toml(tmp_path: Path) -> None:
    (tmp_path / "kvtier.toml").write_text("tenant = ")
    with pytest.raises(ConfigError, match=r"kvtier\.toml"):
        load_settings({"config": str(tmp_path / "kvtier.toml")}, 32)


UNUSABLE: dict[str, tuple[dict[str, Any], list[str]]] = {
    "policy": (
        transfer(settings(), policy=None),
        ["kv_load_failure_policy is 'fail'", '"kv_load_failure_policy": "recompute"'],
    ),
    "secret": (
        transfer(settings() | {"tenants": {"red": {"secret": "env:NOT_EXPORTED"}}}),
        ["tenants.red.secret", "NOT_EXPORTED", "export it"],
    ),
}


@pytest.mark.parametrize(("connector", "told"), UNUSABLE.values(), ids=UNUSABLE)
def test_an_engine_that_cannot_use_it_does_not_start(lab: Lab, connector: dict[str, Any], told: list[str]) -> None:
    with pytest.raises(EngineError) as error, lab.engine(connector, own_process=True):
        pass
    for words in told:
        assert words in str(error.value)
