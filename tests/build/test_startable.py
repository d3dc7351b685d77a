"""What an engine cannot start with is refused before it loads a model, and nothing is made or opened meanwhile."""

import os
from pathlib import Path
from typing import Any

import pytest

from kvtier.build.startable import require_startable
from kvtier.config import parse_config
from kvtier.errors import ConfigError
from kvtier.tiers.disk.medium.folder import MARKER

ENVIRON = {"SECRET": "a secret of more than sixteen bytes", "TOKEN": "token"}
TENANT = {"secret": "env:SECRET", "token": "env:TOKEN"}


def _require(folder: Path, *, device_type: str = "cpu", **tables: Any) -> None:
    data = {"tenant": "red", "tenants": {"red": TENANT}} | tables
    require_startable(parse_config(data, source="kvtier.toml", folder=folder, environ=ENVIRON), device_type)


def test_what_can_start_leaves_no_trace(tmp_path: Path) -> None:
    tables = {"disk": {"directory": "kv/of/engine"}, "pool": {"address": "127.0.0.1:1"}}
    _require(tmp_path, cache={"record_trace": "engine.trace"}, **tables)
    assert not list(tmp_path.iterdir())


def test_a_folder_of_a_tier_can_be_used_again(tmp_path: Path) -> None:
    (tmp_path / MARKER).write_text("kvtier disk tier, format 2\n")
    _require(tmp_path, disk={"directory": "."})


@pytest.mark.parametrize(
    ("tables", "told"),
    [
        ({"tenants": {"red": {"secret": "env:NOT_EXPORTED"}}}, "NOT_EXPORTED is missing"),
        ({"tenants": {"red": {"secret": "env:SECRET"}}, "pool": {"address": "127.0.0.1:1"}}, r"tenants\.red\.token"),
        ({"tenants": {"red": TENANT | {"sealing_keys": "env:NO_KEYS"}}}, "NO_KEYS is missing"),
        ({"pool": {"address": "127.0.0.1:1", "tls_ca": "ca.pem"}}, "ca.pem"),
        ({"cache": {"verify_loads": "device"}}, "verify_loads"),
        ({"cache": {"record_trace": "nowhere/engine.trace"}}, "record_trace"),
        ({"disk": {"directory": "file/kv"}}, "file.* may write"),
        ({"disk": {"directory": "others"}}, "holds other files"),
        ({"disk": {"directory": "kv", "admission": "sometimes"}}, "sometimes"),
    ],
    ids=["secret", "token", "sealing", "tls", "device", "trace", "no folder", "others' folder", "admission"],
)
def test_what_cannot_start_is_refused(tables: dict[str, Any], told: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "letter").touch()
    with pytest.raises(ConfigError, match=told):
        _require(tmp_path, **tables)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_this_user_may_not_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir(mode=0o500)
    for place in ("kv", "kv/below"):
        with pytest.raises(ConfigError, match="may write"):
            _require(tmp_path, disk={"directory": place})
