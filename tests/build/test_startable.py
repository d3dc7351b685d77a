"""What an engine cannot start with is refused before it loads a model, and nothing is made or opened meanwhile."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.build.startable import require_startable
from kvtier.config import parse_config
from kvtier.errors import ConfigError
from kvtier.tiers.disk.medium.folder import MARKER

ENVIRON = {"SECRET": "a secret of more than sixteen bytes", "TOKEN": "token"}
AN_OTHER_USER = 1234
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


@contextlib.contextmanager
def _not_root() -> Iterator[None]:
    """Another user than root in this process: root may write everywhere, and tests run as root in containers."""
    if os.geteuid() != 0:
        yield
        return
    os.setresuid(AN_OTHER_USER, AN_OTHER_USER, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


def test_a_folder_that_this_user_may_not_write_is_refused() -> None:
    with tempfile.TemporaryDirectory(prefix="kvtier-startable-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # pytest's own cannot be entered by other users
        (folder / "kv").mkdir(mode=0o555)
        for place in ("kv", "kv/below"):
            with _not_root(), pytest.raises(ConfigError, match="may write"):
                _require(folder, disk={"directory": place})
