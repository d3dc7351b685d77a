"""How users configure the storage backend, what its pages are kept by, and what they are told when it cannot work."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sglang
import torch
from safetensors.torch import save_file
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import get_context
from sglang.srt.server_args import ServerArgs
from storage_rig import ALONE, CachePool, digests, extra, host_pool, indices, storage

from kvtier.errors import ConfigError
from kvtier_sglang import KvtierStorage, compat, identity
from kvtier_sglang.identity import model_digest
from kvtier_sglang.page_keys import PageKeys
from kvtier_sglang.settings import load_settings

FILE = """
tenant = "red"
[tenants.red]
secret = "file:secret"
[pool]
address = "unix:/run/kvtier.sock"
call_timeout_s = 2.0
[disk]
directory = "/kv"
"""
POOL = {"address": ["unix:/run/kvtier.sock"]}
GOLDEN = "edffbbe14de80b6021870359901ff95e6d7153a910c04027d54d35eb9b0cd245eab3653a4f6439e8e1274d7a353321a0"
"""The key of a page, made by hand from the formulas of `kvtier.identity.keys`: changing it forgets all that pools
have."""


@contextlib.contextmanager
def serving(**options: Any) -> Iterator[None]:
    """As in a server's scheduler."""
    context = get_context()
    before = context._server_args
    context.set_server_args(ServerArgs(**options))
    try:
        yield
    finally:
        context._server_args = before


def test_inline_keys_win_over_the_file_key_by_key(tmp_path: Path) -> None:
    (tmp_path / "kvtier.toml").write_text(FILE)
    (tmp_path / "secret").write_text("a secret of more than sixteen bytes")
    inline = {"config": str(tmp_path / "kvtier.toml"), "pool": {"call_timeout_s": 3.0}, "interface_v1": 1}
    settings = load_settings(inline | {"prefetch_threshold": 1, "file_storage_path": "/kv"})
    assert settings.config.pool.call_timeout_s == 3.0
    assert settings.config.pool.address == ["unix:/run/kvtier.sock"]
    assert settings.config.chain_secret("red") == b"a secret of more than sixteen bytes", "relative to the file"
    assert settings.is_zero_copy
    assert not load_settings(extra(pool=POOL) | {"interface_v1": 0}).is_zero_copy


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"config": "/nowhere/kvtier.toml"}, ["hicache-storage-backend-extra-config.config", "/nowhere/kvtier.toml"]),
        ({"config": 1}, ["hicache-storage-backend-extra-config.config", "no text"]),
        ({"pools": {}}, ["pools", "did you mean 'pool'"]),
        ({"model_revison": "2"}, ["model_revison", "did you mean 'model_revision'"]),
        ({"prefetch_treshold": 1}, ["prefetch_treshold", "did you mean 'prefetch_threshold'"]),
        ({"pool": {"adress": "x"}}, ["pool.adress", "did you mean 'address'"]),
        ({"pool": {}}, ["pool.address", "missing"]),
        ({"pool": {**POOL, "write_policy": "write_back"}}, ["pool.write_policy", "write_through"]),
        ({"pool": {**POOL, "call_timeout_s": 6.0}}, ["pool.call_timeout_s is 6", "11.0 s", "/flush_cache"]),
        ({"cache": {"lookup_deadline_s": 2.0}}, ["cache.lookup_deadline_s 2", "11.5 s", "/flush_cache"]),
        ({"tenant": "green"}, ["tenant", "'green' has no table"]),
        ({"tenants": {"red": {"secret": "env:NO_SUCH", "token": "env:RED_TOKEN"}}}, ["tenants.red.secret", "NO_SUCH"]),
        ({"tenants": {"red": {"secret": "env:KV_SECRET"}}}, ["tenants.red.token", "missing"]),
        ({"gateway_tenants": ["red"]}, ["gateway_tenants"]),
        ({"model_revision": ""}, ["model_revision", "no text"]),
        ({"model_revision": None}, ["model_folder", "model_revision"]),
        ({"model_revision": None, "model_folder": "/nowhere"}, ["/nowhere", "safetensors"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_errors_name_key_and_remedy(more: dict[str, Any], told: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        KvtierStorage(replace(ALONE, extra_config=extra() | {"pool": POOL} | more), {})
    for words in told:
        assert words in str(error.value)


def test_weights_are_known_by_their_content(tmp_path: Path) -> None:
    settings = load_settings(extra(pool=POOL, model_revision=None))

    def digest(folder: Path, value: float = 1.0, **config: Any) -> bytes:
        folder.mkdir(exist_ok=True)
        save_file({"weight": torch.full((4, 4), value)}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"_name_or_path": str(folder), **config}))
        return model_digest(replace(settings, model_folder=folder), "any", tmp_path / "digests")

    one = digest(tmp_path / "one", rope_theta=1)
    assert digest(tmp_path / "two", rope_theta=1) == one, "wherever they lie"
    assert digest(tmp_path / "three", 2.0, rope_theta=1) != one
    assert digest(tmp_path / "four", rope_theta=2) != one


def test_options_of_the_server_part_engines(tmp_path: Path) -> None:
    scales = tmp_path / "scales.json"

    def digest(**options: Any) -> bytes:
        with serving(model_path="dummy", **options):
            return model_digest(load_settings(extra(pool=POOL)), "any")

    plain = digest()
    assert digest() == plain
    assert digest(hicache_write_policy="write_back") == plain, "says nothing of KV"
    scales.write_text("{}")
    scaled = digest(quantization_param_path=str(scales))
    scales.write_text("{ }")
    others = [
        scaled,
        digest(quantization_param_path=str(scales)),
        digest(kv_cache_dtype="fp8_e4m3"),
        digest(kv_cache_dtype="fp8_e5m2"),
        digest(json_model_override_args='{"rope_theta": 1}'),
        digest(load_format="dummy"),
        digest(linear_attn_backend="flashinfer"),
        digest(enable_decoder_swa_bounded_replay=True),
        digest(forward_hooks=[{"name": "steer"}]),
        digest(mm_process_config={"image": {"max_pixels": 1}}),
        digest(speculative_draft_kv_cache_dtype="fp8_e4m3"),
    ]
    assert len({plain, *others}) == 1 + len(others)
    with pytest.raises(ConfigError, match="--lora-paths"):
        digest(lora_paths=["/adapters/a"])


def test_options_that_count_are_options_of_sglang() -> None:
    known = {field.name for field in msgspec.structs.fields(ServerArgs)}
    assert {*identity._ARITHMETIC, *identity._FROM_ELSEWHERE} <= known, "another name is always None"


@pytest.mark.parametrize(
    "options",
    [
        {"load_format": "dummy"},
        {"load_format": "pt"},
        {"load_format": "remote_instance"},
        {"weight_cache_mode": "client"},
        {"kt_weight_path": "/experts"},
        {"modelopt_checkpoint_restore_path": "/quantised"},
        {"checkpoint_engine_wait_weights_before_ready": True},
        {"decrypted_config_file": "/config.json"},
    ],
    ids=lambda options: "-".join(map(str, *options.items())),
)
def test_weights_that_are_not_those_of_the_folder_need_a_revision(tmp_path: Path, options: dict[str, Any]) -> None:
    save_file({"weight": torch.ones(4)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    settings = load_settings(extra(pool=POOL, model_revision=None))
    with serving(model_path=str(tmp_path), **options):
        with pytest.raises(ConfigError, match="model_revision") as error:
            model_digest(settings, "any", tmp_path / "digests")
        assert "--" + next(iter(options)).replace("_", "-") in str(error.value)
        model_digest(replace(settings, model_revision="1"), "any")


def test_files_beside_the_configuration_count(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(4)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    settings = replace(load_settings(extra(pool=POOL, model_revision=None)), model_folder=tmp_path)

    def digest(**options: Any) -> bytes:
        with serving(model_path=str(tmp_path), **options):
            return model_digest(settings, "any", tmp_path / "digests")

    plain = digest()
    (tmp_path / "modeling_tiny.py").write_text("# another model")
    assert digest() == plain, "code that SGLang does not run"
    trusted = digest(trust_remote_code=True)
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"kv_cache_quant_algo": "FP8"}}')
    quantised = digest()
    (tmp_path / "preprocessor_config.json").write_text('{"max_pixels": 1}')
    assert len({plain, trusted, quantised, digest()}) == 4


@pytest.mark.parametrize(
    "change", [("model_runner.update_model_fields", "model_path"), ("scheduler.weight_version",) * 2]
)
def test_weights_that_change_while_sglang_runs_end_it(pool: CachePool, tmp_path: Path, change: tuple[str, str]) -> None:
    keys, mine = digests(2, start=52 + len(change[1])), host_pool(seed=52)
    save_file({"weight": torch.ones(4)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    named: dict[str, Any] = {"model_revision": None, "model_folder": str(tmp_path)}
    with get_context().override_server_args():
        with storage(pool, mine, **named) as made:
            assert made.batch_set_v1(keys[:1], indices(0)) == [True]
            get_context().override("eagle", speculative_num_steps=2)
            assert made.batch_exists(keys) == 1, "options that change are not weights"
            source, name = change
            get_context().override(source, **{name.removeprefix("scheduler."): "others"})
            assert made.batch_exists(keys) == 0
            assert made.batch_exists_v2(keys).kv_hit_pages == 0
            assert made.batch_get_v1(keys[:1], indices(1)) == [False]
            assert made.batch_set_v1(keys[1:], indices(1)) == [False]
            assert not made.exists(keys[0])
            assert made.batch_exists(keys) == 0, "nor later"
        with pytest.raises(ConfigError, match="model_revision"), storage(pool, mine, **named):
            pass
        with storage(pool, mine, model_revision="after the change") as made:
            assert made.batch_set_v1(keys, indices(0, 1)) == [True] * 2
            assert made.batch_exists(keys) == 2


def test_changes_of_weights_are_noted_by_these_names() -> None:
    srt = Path(sglang.__file__).parent / "srt"
    noting = (srt / "model_executor" / "model_runner.py", srt / "managers" / "scheduler.py")
    source = "".join(file.read_text() for file in noting)
    for name in compat._CHANGES_WEIGHTS:
        assert f'"{name}"' in source


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"hots": {}}, "did you mean 'host'"),
        ({"tenants": {"red": {"secret": "env:NOT_EXPORTED"}}}, r"tenants\.red\.secret: .*NOT_EXPORTED"),
        ({"pool": {"address": "127.0.0.1:1", "tls_ca": "/nowhere/ca.pem"}}, "/nowhere/ca.pem"),
    ],
    ids=["key", "secret", "certificate"],
)
def test_what_options_show_is_refused_before_sglang_starts_processes(said: dict[str, Any], told: str) -> None:
    """By SGLang itself, which finds our plug-in among what is installed. What it refuses there itself comes later."""
    load_plugins()
    options = {"hicache_storage_backend_extra_config": json.dumps(extra(pool=POOL) | said)}
    arguments = ServerArgs(model_path="nobody/no-such-model", hicache_storage_backend="dynamic", **options)
    with pytest.raises(ConfigError, match=told):
        arguments.check_server_args()


def test_sglang_gives_its_storage_threads_10_s() -> None:
    """Which the longest deadlines are made for."""
    controller = Path(sglang.__file__).parent / "srt" / "managers" / "cache_controller.py"
    assert "t.join(timeout=10)" in controller.read_text()


def test_the_models_folder_is_the_servers(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(4)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    settings = load_settings(extra(pool=POOL, model_revision=None))
    with serving(model_path=str(tmp_path)):
        found = model_digest(settings, "any", tmp_path / "digests")
        assert found == model_digest(replace(settings, model_folder=tmp_path), "any", tmp_path / "digests")
    with (
        serving(model_path="nobody/no-such-model"),
        pytest.raises(ConfigError, match="nobody/no-such-model"),
    ):
        model_digest(settings, "any", tmp_path / "digests")


def test_a_model_of_the_hugging_face_cache_is_found_there(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "models--tiny--model"
    snapshot = folder / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("a" * 40)
    save_file({"weight": torch.ones(4)}, snapshot / "model.safetensors")
    (snapshot / "config.json").write_text("{}")
    settings = load_settings(extra(pool=POOL, model_revision=None))
    with serving(model_path="tiny/model", download_dir=str(tmp_path / "cache")):
        found = model_digest(settings, "any", tmp_path / "digests")
        assert found == model_digest(replace(settings, model_folder=snapshot), "any", tmp_path / "digests")


def test_the_weights_of_a_draft_model_count(tmp_path: Path) -> None:
    def digest(value: float) -> bytes:
        for name in ("model", "draft"):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "config.json").write_text("{}")
        save_file({"weight": torch.ones(4)}, tmp_path / "model" / "model.safetensors")
        save_file({"weight": torch.full((4,), value)}, tmp_path / "draft" / "model.safetensors")
        with serving(model_path=str(tmp_path / "model"), speculative_draft_model_path=str(tmp_path / "draft")):
            settings = load_settings(extra(pool=POOL, model_revision=None))
            return model_digest(settings, "any", tmp_path / "digests")

    assert digest(1.0) == digest(1.0)
    assert digest(1.0) != digest(2.0)


def test_weights_that_were_replaced_are_others(pool: CachePool, tmp_path: Path) -> None:
    keys, mine = digests(1, start=51), host_pool(seed=51)
    (tmp_path / "config.json").write_text("{}")
    for value, expected in ((1.0, 0), (1.0, 1), (2.0, 0)):
        save_file({"weight": torch.full((4,), value)}, tmp_path / "model.safetensors")
        with storage(pool, mine, model_revision=None, model_folder=str(tmp_path)) as made:
            assert made.batch_exists(keys) == expected
            made.batch_set_v1(keys, indices(0))


def test_keys_of_pages_are_the_same_in_every_process() -> None:
    keys = PageKeys(load_settings(extra(pool=POOL)).config)
    digest = "00" * 31 + "ff"
    assert [key.hex() for key in keys.of([digest])] == [GOLDEN]
    assert keys.of([digest, "x", digest]) == [keys.of([digest])[0], keys.of(["x"])[0], keys.of([digest])[0]]
