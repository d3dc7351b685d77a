"""How users configure the connector, and what they are told when it cannot work like that."""

import functools
import platform
import shutil
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
from engine_lab import Lab
from lab_child import EngineError
from model_classes import found_out_here
from prometheus_client import generate_latest
from vllm.config import KVTransferConfig, ParallelConfig
from vllm.engine.arg_utils import EngineArgs
from vllm_rig import ENVIRON, settings, transfer

from dashboard_rig import check_against_docs, of_engines, ours_in_vllm
from kvtier.device.kv import MemoryUse
from kvtier.errors import ConfigError
from kvtier.metrics import Metrics
from kvtier.tiers.common.breaker import CircuitBreaker
from kvtier.tiers.common.gauges import MemoryGauges, RankMemory
from kvtier_vllm.observe.relay import Relay
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


def test_what_all_processes_count_is_shown_by_vllm() -> None:
    """Ranks and moments add up, of gauges and latencies, too, and samples are there before anything has happened."""
    shown = prometheus_client.CollectorRegistry()
    kinds = (prometheus_client.Gauge, prometheus_client.Counter, prometheus_client.Histogram)
    types: Any = {kind: functools.partial(kind, registry=shown) for kind in kinds}
    config: Any = SimpleNamespace(kv_transfer_config=None)
    with_tiers = load_settings(settings(disk={"directory": "/kv"}, pool={"address": ["127.0.0.1:1"]}), 16)
    page = KvtierPromMetrics(config, types, ["engine"], {0: ["0"]}, config=with_tiers)

    def value(name: str, **labels: str) -> float | None:
        return shown.get_sample_value(f"vllm:kvtier_{name}", {"engine": "0"} | labels)

    errors = {"tier": "pool", "op": "read", "error": "BreakerOpen"}
    assert value("io_errors_total", **errors) == 0
    assert value("open_breakers", tier="pool") == 0
    assert value("corrupt_blocks_total", tier="pool") == 0
    assert value("tier_batch_seconds_count", tier="pool", op="read") == 0
    assert value("path_bytes_total", path="tcp", op="read") == 0
    assert value("codec_bytes_total", tier="disk", codec="raw", form="stored") == 0
    as_ours = ours_in_vllm(generate_latest(shown).decode())
    check_against_docs(as_ours)
    later = {"kvtier_tier_declined_blocks_total", "kvtier_namespace_info"}  # with the first figures of a rank
    assert {name for name in of_engines() if f"# TYPE {name} " not in as_ours} == later
    assert value("build_info", version=version("kvtier"), python_version=platform.python_version()) == 1

    ranks = [(metrics, Relay(metrics.registry)) for metrics in (Metrics(), Metrics())]
    breaker, memory = CircuitBreaker(1, 60.0), [RankMemory(5, 0, MemoryUse(0, 7, 0.0))]
    for metrics, _ in ranks:
        metrics.levels.watch_breaker("pool", breaker)
        MemoryGauges(metrics.registry, lambda: memory[0])
    breaker.failure()
    for _ in range(2):
        stats = KvtierStats()
        for metrics, relay in ranks:
            metrics.io_errors.labels("pool", "read", "BreakerOpen").inc(2)
            metrics.pins.labels("pool", "pinned").inc()
            for seconds in (0.0004, 0.0015, 0.0015, 0.9):
                metrics.tier_batch_seconds.labels("pool", "read").observe(seconds)
            relay.look_next()
            stats.aggregate(KvtierStats(relay.take()))
        page.observe(stats.to_dict())
        memory[0] = RankMemory(5, 0, MemoryUse(0, 4, 0.0))
    assert value("io_errors_total", **errors) == 8
    assert value("pins_total", tier="pool", status="pinned") == 4
    assert value("open_breakers", tier="pool") == 2
    found = {kind: value("memory_bytes", kind=kind) for kind in ("arena", "leased", "pinned")}
    assert found == {"arena": 10, "leased": 0, "pinned": 8}
    reads = {"tier": "pool", "op": "read"}
    assert value("tier_batch_seconds_count", **reads) == 16
    assert value("tier_batch_seconds_sum", **reads) == pytest.approx(4 * 0.9034)
    counts = [value("tier_batch_seconds_bucket", le=le, **reads) for le in ("0.0001", "0.0005", "0.002", "0.2", "1.0")]
    assert counts == [0, 4, 12, 12, 16]


def test_the_log_has_blocks_and_no_more() -> None:
    stats = KvtierStats({"counter\tkvtier_loaded_blocks\ttier=pool": 3, "counter\tkvtier_saved_blocks": 2})
    stats.aggregate(KvtierStats({"counter\tkvtier_saved_blocks": 4, "gauge\tkvtier_open_breakers\ttier=pool": 1}))
    assert stats.reduce() == {"loaded_blocks.pool": 3, "saved_blocks": 6}


def test_a_process_tells_what_has_changed_and_nothing_twice() -> None:
    metrics = Metrics()
    relay = Relay(metrics.registry)
    metrics.corrupt_blocks.labels("disk").inc(2)
    assert relay.take() == {"counter\tkvtier_corrupt_blocks\ttier=disk": 2}
    relay.look_next()
    assert relay.take() == {}
