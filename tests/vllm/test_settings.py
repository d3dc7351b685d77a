"""How users configure the connector, and what they are told when it cannot work like that."""

import functools
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
from engine_lab import Lab
from lab_child import EngineError
from model_classes import found_out_here
from vllm.config import KVTransferConfig, ParallelConfig
from vllm.engine.arg_utils import EngineArgs
from vllm_rig import ENVIRON, settings, transfer

from kvtier.device.kv import MemoryUse
from kvtier.errors import ConfigError
from kvtier.offload.jobs import JobResult
from kvtier.tiers.common.gauges import RankMemory
from kvtier_vllm import worker
from kvtier_vllm.observe.stats import KvtierPromMetrics, KvtierStats
from kvtier_vllm.settings import load_settings, of_rank, of_worker

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
    ("parallel", "num_ranks", "threads"),
    [
        ({}, 1, 4),
        ({"tensor_parallel_size": 8}, 8, 2),
        ({"tensor_parallel_size": 4, "pipeline_parallel_size": 2}, 8, 2),
        ({"tensor_parallel_size": 16, "nnodes": 2, "master_addr": "127.0.0.1", "node_rank": 1}, 8, 2),
        ({"tensor_parallel_size": 2, "data_parallel_size": 4, "data_parallel_size_local": 4}, 2, 2),
    ],
    ids=["one", "tensor parallel", "pipeline parallel", "two nodes", "data parallel"],
)
def test_ranks_share_what_their_engine_has_on_a_host(
    parallel: dict[str, Any], num_ranks: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM's own offloading does: memory among the ranks of an engine. Cores are for the engines of all."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(64)))
    config = load_settings(settings(host={"capacity_bytes": "16GiB"}), 32)
    config = of_rank(config, ParallelConfig(distributed_executor_backend="mp", **parallel))
    assert config.host_bytes() == (16 << 30) // num_ranks
    assert config.cache.load_threads == threads


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


NO_POLICY = ["kv_load_failure_policy is 'fail'", '"kv_load_failure_policy": "recompute"']
NO_SECRET = settings() | {"tenants": {"red": {"secret": "env:NOT_EXPORTED"}}}
NO_TOKEN = settings(pool={"address": "127.0.0.1:1"}) | {
    "tenants": {"red": {"secret": "env:KV_SECRET", "token": "env:NO_TOKEN"}}
}


def _multi(**child: Any) -> dict[str, Any]:
    within = {"kv_connector_extra_config": {"connectors": [transfer(settings(), **child)]}}
    return transfer({}) | {"kv_connector": "MultiConnector", "kv_connector_module_path": None} | within


def _tier(**settings_of_tier: Any) -> dict[str, Any]:
    tiers = [{"type": "KvtierTier", "module_path": "kvtier_vllm.secondary_tier", **settings_of_tier}]
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", "secondary_tiers": tiers},
    }


UNUSABLE: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "policy": (transfer(settings(), policy=None), {}, NO_POLICY),
    "policy of a part": (_multi(policy=None), {}, NO_POLICY),
    "secret": (transfer(NO_SECRET), {}, ["tenants.red.secret", "NOT_EXPORTED", "export it"]),
    "token": (transfer(NO_TOKEN), {}, ["tenants.red.token", "NO_TOKEN"]),
    "certificate": (transfer(settings(pool={"tls_ca": "/nowhere/ca.pem"})), {}, ["/nowhere/ca.pem"]),
    "folder": (transfer(settings(disk={"directory": "/dev/null"})), {}, ["/dev/null", "may write"]),
    "verified on the device": (transfer(settings(cache={"verify_loads": "device"})), {}, ["verify_loads"]),
    "secondary tier": (_tier(hots={}), {}, ["hots", "did you mean 'host'"]),
    "hashes": (
        transfer(settings(gateway=["blue"])),
        {"prefix_caching_hash_algo": "xxhash", "enable_prefix_caching": True},
        ["gateway_tenants", "use sha256"],
    ),
    "drafts": (
        transfer(settings()),
        {"speculative_config": {"method": "ngram_gpu", "num_speculative_tokens": 2, "prompt_lookup_max": 2}},
        ["speculative decoding by ngram_gpu"],
    ),
}


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Secrets and tokens are in the environment, as where an engine runs."""
    for name, value in ENVIRON.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("exported")
@pytest.mark.parametrize(("connector", "options", "told"), UNUSABLE.values(), ids=UNUSABLE)
def test_what_vllms_configuration_shows_is_refused_while_vllm_makes_it(
    lab: Lab, connector: dict[str, Any], options: dict[str, Any], told: list[str]
) -> None:
    arguments = EngineArgs(model=str(lab.model), kv_transfer_config=KVTransferConfig(**connector), **options)
    with found_out_here(), pytest.raises(ConfigError) as error:
        arguments.create_engine_config()
    for words in told:
        assert words in str(error.value)


@pytest.mark.usefixtures("exported")
def test_a_folder_without_weights_is_refused_then_too_and_what_can_start_is_not(lab: Lab, tmp_path: Path) -> None:
    shutil.copytree(lab.model, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    connector = KVTransferConfig(**transfer(settings(disk={"directory": str(tmp_path / "kv")})))
    with found_out_here():
        assert EngineArgs(model=str(lab.model), kv_transfer_config=connector).create_engine_config() is not None
        with pytest.raises(ConfigError, match=r"no \*\.safetensors there"):
            EngineArgs(model=str(tmp_path / "model"), kv_transfer_config=connector).create_engine_config()
    assert not (tmp_path / "kv").exists(), "nothing was made"


def test_the_connector_refuses_too_where_vllm_loads_no_plugins(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "none")
    connector, _, told = UNUSABLE["policy"]
    with pytest.raises(EngineError) as error, lab.engine(connector, own_process=True):
        pass
    for words in told:
        assert words in str(error.value)


def test_blocks_that_host_memory_had_do_not_count_as_saved() -> None:
    stats = KvtierStats()
    stats.note(JobResult(1, "save", failed=frozenset([4]), tiers=("",) * 5, found=frozenset([0, 1])))
    assert stats.reduce() == {"saved_blocks": 2}
    stats.note(JobResult(2, "save", failed=frozenset([1]), tiers=("",) * 2, found=frozenset([0])))
    assert stats.reduce() == {"saved_blocks": 2}


def test_memory_of_all_ranks_is_a_gauge_of_vllms() -> None:
    """Each rank tells what it has gained; ranks and moments add up."""
    registry = prometheus_client.CollectorRegistry()

    kinds = (prometheus_client.Gauge, prometheus_client.Counter, prometheus_client.Histogram)
    types: Any = {kind: functools.partial(kind, registry=registry) for kind in kinds}
    config: Any = SimpleNamespace(kv_transfer_config=None)
    metrics = KvtierPromMetrics(config, types, ["engine"], {0: ["0"]})
    for gained in ({"arena": 5, "leased": 0, "pinned": 7}, {"arena": 5, "leased": 2, "pinned": -3}):
        first, second = KvtierStats(), KvtierStats()
        first.note_memory(gained)
        second.note_memory(gained)
        metrics.observe(first.aggregate(second).to_dict())
    found = {
        kind: registry.get_sample_value("vllm:kvtier_memory_bytes", {"engine": "0", "kind": kind})
        for kind in ("arena", "leased", "pinned")
    }
    assert found == {"arena": 20, "leased": 4, "pinned": 8}


def test_a_worker_tells_of_its_memory_when_that_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_TELL_S", 0.0)
    side = worker.WorkerSide(None, None, None)  # type: ignore[arg-type]
    assert side.take_stats() is None
    use = MemoryUse(staging_bytes=3, pinned_bytes=15)
    for memory, told in (
        (RankMemory(10, 5, use), {"arena": 10, "leased": 5, "pinned": 15, "staging": 3}),
        (RankMemory(10, 5, use), None),
        (RankMemory(10, 0, use), {"leased": -5}),
    ):
        side._memory_use = lambda memory=memory: memory
        stats = side.take_stats()
        assert (None if stats is None else stats.data) == (
            None if told is None else {f"gained_bytes.{kind}": nbytes for kind, nbytes in told.items()}
        )
