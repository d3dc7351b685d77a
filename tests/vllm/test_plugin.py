"""With kvtier installed, vLLM starts as without it: what the plug-in meets with does not come in the way."""

import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
import vllm
from engine_lab import Lab
from model_classes import found_out_here
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine import arg_utils
from vllm.engine.arg_utils import EngineArgs
from vllm_rig import ENVIRON, settings, transfer

import kvtier_vllm
from kvtier.errors import ConfigError
from kvtier_vllm import plugin

LEFT_OUT = "kvtier's check before the start was left out"


def configuration(lab: Lab, connector: dict[str, Any] | None = None) -> VllmConfig:
    named = None if connector is None else KVTransferConfig(**connector)
    with found_out_here():
        return EngineArgs(model=str(lab.model), kv_transfer_config=named).create_engine_config()


def test_nothing_of_kvtier_but_the_plug_in_is_imported_where_it_is_not_named() -> None:
    """In a process of its own: this one has all of kvtier."""
    code = (
        "import sys; from vllm.engine.arg_utils import EngineArgs; from vllm.plugins import load_general_plugins;"
        "load_general_plugins(); assert EngineArgs.create_engine_config.__wrapped__;"
        "print(sorted(name for name in sys.modules if name.startswith('kvtier')))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    ours = ["kvtier", "kvtier.errors", "kvtier.system", "kvtier.system.early_checks", "kvtier_vllm"]
    assert done.stdout.splitlines()[-1] == str([*ours, "kvtier_vllm.plugin"])


@pytest.mark.parametrize("named", [None, transfer(settings())], ids=["not named", "named"])
def test_what_cannot_be_looked_at_is_left_out(
    lab: Lab, named: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in ENVIRON.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "kvtier_vllm.early_checks", None)  # as where one of its imports has moved
    assert configuration(lab, named).kv_transfer_config is not None or named is None
    lines = [line for line in caplog.messages if LEFT_OUT in line]
    assert len(lines) == (0 if named is None else 1)


def test_a_configuration_of_another_shape_is_left_alone(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    args = EngineArgs(model=str(lab.model))
    del args.kv_transfer_config  # the class has None, as a field that is gone would not
    monkeypatch.delattr(EngineArgs, "kv_transfer_config")
    calls = []
    wrapped = plugin._checked(lambda arguments, *args, **kwargs: calls.append((args, kwargs)))
    wrapped(args, 1, headless=True)
    assert calls == [((1,), {"headless": True})]
    assert [LEFT_OUT in line for line in caplog.messages] == [True]


def test_vllms_own_errors_are_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    def create(arguments: EngineArgs) -> None:
        raise ValueError("of vLLM")

    with pytest.raises(ValueError, match="of vLLM"):
        plugin._checked(create)(EngineArgs(model="any"))


def test_another_release_is_refused_by_its_number_before_what_it_may_not_have(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    for module in ("early_checks", "requirements", "compat", "connector"):
        monkeypatch.setitem(sys.modules, f"kvtier_vllm.{module}", None)
    with pytest.raises(ConfigError, match=r"vLLM 0\.32\.x, 0\.33\.x, this is 0\.99\.0"):
        configuration(lab, transfer(settings()))
    with pytest.raises(ConfigError, match=r"this is 0\.99\.0"):
        _ = kvtier_vllm.KvtierConnector


def test_a_module_without_the_wrapped_function(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, arg_utils.__name__, ModuleType(arg_utils.__name__))
    plugin.register()
    assert [LEFT_OUT in line for line in caplog.messages] == [True]
