"""With kvtier installed, SGLang starts as without it: what the plug-in meets with does not come in the way."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import sglang
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs

import kvtier_sglang
from kvtier.errors import ConfigError
from kvtier_sglang import plugin

LEFT_OUT = "kvtier's check before the start was left out"


@pytest.mark.parametrize(
    "server_args",
    [
        SimpleNamespace(),
        SimpleNamespace(hicache_storage_backend="dynamic"),
        SimpleNamespace(hicache_storage_backend="dynamic", hicache_storage_backend_extra_config="{"),
    ],
    ids=["no backend", "no extra config", "no JSON"],
)
def test_options_of_another_shape_are_left_alone(server_args: Any, caplog: pytest.LogCaptureFixture) -> None:
    plugin._check(server_args)
    assert [LEFT_OUT in line for line in caplog.messages] == [True]


def test_a_call_of_another_shape_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    plugin._check(ServerArgs(model_path="any"), strict=True)
    assert [LEFT_OUT in line for line in caplog.messages] == [True]


@pytest.mark.parametrize(
    "target", ["sglang.srt.arg_groups.nowhere.check", "sglang.srt.arg_groups.validation_hook.gone"]
)
def test_a_function_that_has_moved_is_not_hooked(
    target: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plugin, "_CHECKED", target)
    plugin.register()
    assert [LEFT_OUT in line for line in caplog.messages] == [True]
    assert target not in HookRegistry._hooks, "SGLang would log a traceback of it"


def test_other_backends_are_not_looked_at(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "kvtier.config.engine_attempts", None)
    plugin._check(ServerArgs(model_path="any"))
    plugin._check(SimpleNamespace(hicache_storage_backend="dynamic", hicache_storage_backend_extra_config="{}"))
    assert not caplog.records


def test_another_release_is_refused_by_its_number_before_what_it_may_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang, "__version__", "0.6.0")
    for module in ("kvtier.config.engine_attempts", "kvtier_sglang.compat", "kvtier_sglang.storage"):
        monkeypatch.setitem(sys.modules, module, None)
    said = '{"class_name": "KvtierStorage"}'
    with pytest.raises(ConfigError, match=r"0\.5\.23, this is 0\.6\.0"):
        plugin._check(SimpleNamespace(hicache_storage_backend="dynamic", hicache_storage_backend_extra_config=said))
    with pytest.raises(ConfigError, match=r"this is 0\.6\.0"):
        _ = kvtier_sglang.KvtierStorage
