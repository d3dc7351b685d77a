"""A check of a plug-in may refuse an engine's start, and may not break it."""

import logging
import sys
from types import ModuleType

import pytest

from kvtier.errors import ConfigError
from kvtier.system.early_checks import only_refusing
from kvtier_vllm import plugin

LOG = logging.getLogger("kvtier.test")


def test_only_a_refusal_gets_out_and_without_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    @only_refusing(LOG)
    def refuse() -> None:
        try:
            raise KeyError("why")
        except KeyError as error:
            raise ConfigError("mend it") from error

    with pytest.raises(ConfigError, match="mend it") as refused:
        refuse()
    assert refused.value.__cause__ is None
    assert not caplog.records
    with only_refusing(LOG):
        raise ImportError("cannot import name 'moved'\nfrom there")
    (line,) = caplog.messages
    assert "starts without it" in line
    assert "moved" in line
    assert "\n" not in line


def test_a_vllm_whose_internals_have_moved_starts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own tests are in tests/vllm. vLLM calls this in each process, and ends with what is raised."""
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", ModuleType("vllm.engine.arg_utils"))
    plugin.register()
    (line,) = caplog.messages
    assert "EngineArgs" in line
    monkeypatch.delitem(sys.modules, "vllm.engine.arg_utils")
    plugin.register()
    assert len(caplog.messages) == 1, "a process that makes no configuration has nothing to check"
