"""A pytest plugin that puts our connector into vLLM's own tests: into their modules' namespaces, never into their text.

`pytest -p upstream_plugin tests/v1/kv_connector/unit/...` in a copy of vLLM's tests, with this folder on the path.
"""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from driven_connector import BLOCK_BYTES, REMOTE, DrivenConnector, HandshakeConnector, RecordingConnector
from opt_config import write_model
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from kvtier_vllm.messages import StepMetadata, WorkerIdentity

_EXTRA = {
    "tenant": "red",
    "tenants": {"red": {"secret": "env:KV_SECRET"}},
    "host": {"capacity_bytes": 4096 * BLOCK_BYTES},
}
_OURS = {"kv_connector": "KvtierConnector", "kv_connector_module_path": "kvtier_vllm"}
_STANDS_FOR = {
    "NixlConnector": DrivenConnector,
    "TestExampleConnector": RecordingConnector,
}
_CHILDREN = ("MockHMAConnector", "SimpleCPUOffloadConnector")
"""Children of MultiConnector that ours takes the place of."""
_SPEC = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=1, dtype=torch.float32)
_started: list[Any] = []
"""Connectors, to be closed when their test is over."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = write_model(Path(tempfile.mkdtemp()) / "model")
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        _put_into(module, str(folder))
    for item in items:
        for value in item.callspec.params.values() if hasattr(item, "callspec") else ():
            if hasattr(value, "kv_connector"):
                _replace_in(value)


@pytest.fixture(autouse=True)
def _connectors_are_closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("KV_SECRET", "a secret of more than sixteen bytes")
    yield
    REMOTE.clear()
    while _started:
        _started.pop().shutdown()


def _put_into(module: ModuleType, model: str) -> None:
    """Replaces what this module has imported or defined, under the same names."""
    helpers = module.__dict__
    if "create_vllm_config" in helpers:
        make_config = helpers["create_vllm_config"] = _config_maker(helpers["create_vllm_config"], model)
        helpers["create_mock_connector"] = lambda: _connector(DrivenConnector, make_config())
        helpers["_PPAwareConnector"] = lambda: _connector(HandshakeConnector, make_config())
    if "create_scheduler" in helpers:
        helpers["create_scheduler"] = _closing(helpers["create_scheduler"])
    if "create_request" in helpers:
        helpers["create_request"] = _request_maker(helpers["create_request"])
    helpers["ExampleConnectorMetadata"] = StepMetadata
    helpers["TestExampleConnector"] = RecordingConnector
    helpers["_Metadata"] = lambda: WorkerIdentity(b"n" * 16, BLOCK_BYTES, [])
    helpers["KVCacheConfig"] = lambda **_: _kv_cache_config()


def _config_maker(make: Callable[..., Any], model: str) -> Callable[..., Any]:
    """`create_vllm_config` with a model that is there, and our connector where a test has none of its own."""

    def create(**arguments: Any) -> Any:
        name = arguments.pop("kv_connector", "NixlConnector")
        extra = arguments.pop("kv_connector_extra_config", None)
        arguments |= {"model": model, "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
        if name in _STANDS_FOR:
            ours = _STANDS_FOR[name]
            return make(
                kv_connector=ours.__name__,
                kv_connector_module_path=ours.__module__,
                kv_connector_extra_config=_EXTRA,
                **arguments,
            )
        config = make(kv_connector=name, kv_connector_extra_config=extra, **arguments)
        _replace_in(config.kv_transfer_config)
        return config

    return create


def _replace_in(transfer: Any) -> None:
    """Puts our connector in the place of one that, like ours, lets vLLM manage hybrid memory; also as a child."""
    if transfer.kv_connector in _CHILDREN:
        transfer.kv_connector, transfer.kv_connector_module_path = _OURS.values()
        transfer.kv_connector_extra_config = _EXTRA
    for child in transfer.kv_connector_extra_config.get("connectors", ()):
        if child["kv_connector"] in _CHILDREN:
            child |= _OURS
            child["kv_load_failure_policy"] = "recompute"
            child["kv_connector_extra_config"] = _EXTRA


def _request_maker(make: Callable[..., Any]) -> Callable[..., Any]:
    """`create_request`; with `do_remote_prefill`, our tiers hold what a remote engine would send."""

    def create(*, do_remote_prefill: bool = False, **arguments: Any) -> Any:
        request = make(**arguments)
        if do_remote_prefill:
            REMOTE.append(request)
        return request

    return create


def _closing(make: Callable[..., Any]) -> Callable[..., Any]:
    def create(*arguments: Any, **more: Any) -> Any:
        scheduler = make(*arguments, **more)
        _started.append(scheduler.connector)
        return scheduler

    return create


def _connector(kind: type[Any], config: Any) -> Any:
    connector = kind(config, KVConnectorRole.SCHEDULER, _kv_cache_config())
    _started.append(connector)
    return connector


def _kv_cache_config() -> KVCacheConfig:
    return KVCacheConfig(num_blocks=100, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], _SPEC)])
