"""Which engines share blocks in the pool below vLLM's native offloading, and which settings are refused."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_llama
from engine_lab import Lab
from native_rig import (
    ListeningPool,
    Native,
    content,
    engine_config,
    listening_pool,
    offloading_config,
    set_environment,
    settings,
)
from vllm.config import LoRAConfig, MultiModalConfig, VllmConfig
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec
from vllm_rig import settings as common

from kvtier.errors import ConfigError

CHUNKS = range(6)
CONTENTS = [content(number) for number in CHUNKS]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_environment(monkeypatch, tmp_path)


@pytest.fixture(scope="module")
def engine(lab: Lab) -> VllmConfig:
    return engine_config(lab.model)


@pytest.fixture(scope="module")
def filled(lab: Lab, engine: VllmConfig) -> Iterator[ListeningPool]:
    """Has `CHUNKS` of tenant red."""
    with pytest.MonkeyPatch.context() as patch, listening_pool(lab.home) as running:
        set_environment(patch, lab.home)
        with Native(engine, settings(running.address)) as native:
            native.store(CHUNKS)
        yield running


def test_the_same_weights_at_another_path_meet(lab: Lab, filled: ListeningPool, tmp_path: Path) -> None:
    """Whatever the longest prompt is that they take."""
    shutil.copytree(lab.model, tmp_path / "copy")
    with Native(engine_config(tmp_path / "copy", max_model_len=512), settings(filled.address)) as native:
        assert native.load(CHUNKS) == CONTENTS


ENGINES: dict[str, dict[str, Any]] = {
    "rotary embeddings": {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}},
    "computation": {"dtype": "float16"},
    "hash": {"hash_algorithm": "sha256_cbor"},
}
GEOMETRIES: dict[str, dict[str, Any]] = {
    "layers": {"layers": ("0", "2")},
    "blocks of a chunk": {"blocks_per_chunk": 2},
    "ranks": {"world_size": 2},
}


@pytest.mark.parametrize("change", [{"tenant": "blue"}, {"salt": "other"}, {"secret": "env:OTHER"}], ids=str)
def test_other_tenants_salts_and_secrets_never_meet(
    engine: VllmConfig, filled: ListeningPool, change: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTHER", "another secret of more than sixteen bytes")
    tenant = change.get("tenant", "red")
    other = settings(filled.address, tenant)
    other["tenants"][tenant] |= {name: value for name, value in change.items() if name != "tenant"}
    with Native(engine, other) as native:
        assert native.load(CHUNKS) == []


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_engines_that_compute_otherwise_never_meet(lab: Lab, filled: ListeningPool, options: dict[str, Any]) -> None:
    with Native(engine_config(lab.model, **options), settings(filled.address)) as native:
        assert native.load(CHUNKS) == []


def test_where_the_longest_prompt_matters_engines_that_differ_in_it_never_meet(lab: Lab, filled: ListeningPool) -> None:
    """Long rotary embeddings take other factors for it."""
    factors = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16, "original_max_position_embeddings": 512}
    longrope = {"rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 2.0, **factors}}

    def native(max_model_len: int) -> Native:
        config = engine_config(lab.model, hf_overrides=longrope, max_model_len=max_model_len)
        return Native(config, settings(filled.address))

    with native(1024) as first, native(1024) as second, native(512) as third:
        first.store(CHUNKS)
        assert second.load(CHUNKS) == CONTENTS
        assert third.load(CHUNKS) == []


@pytest.mark.parametrize("change", GEOMETRIES.values(), ids=GEOMETRIES)
def test_chunks_that_look_otherwise_never_meet(
    engine: VllmConfig, filled: ListeningPool, change: dict[str, Any]
) -> None:
    with Native(engine, settings(filled.address), **change) as native:
        assert native.load(CHUNKS) == []


def test_other_weights_never_meet(filled: ListeningPool, tmp_path: Path) -> None:
    tiny_llama.make(tmp_path / "other", seed=1)
    with Native(engine_config(tmp_path / "other"), settings(filled.address)) as native:
        assert native.load(CHUNKS) == []


REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "no pool": ({"pool": {}}, ["pool.address", "missing"]),
    "write policy": (
        {"pool": {"address": ["[::1]:1"], "write_policy": "write_through_selective"}},
        ["pool.write_policy"],
    ),
    "locality": ({"pool": {"address": ["[::1]:1"]}, "locality": "NEAR"}, ["locality", "LOCAL or REMOTE"]),
    "typo": ({"pools": {}}, ["pools", "did you mean 'pool'"]),
    "secret": (
        {"pool": {"address": ["[::1]:1"]}, "tenants": {"red": {"secret": "env:NONE"}}},
        ["NONE", "export it"],
    ),
}


@pytest.mark.parametrize(("change", "told"), REFUSED.values(), ids=REFUSED)
def test_settings_that_cannot_be(engine: VllmConfig, change: dict[str, Any], told: list[str]) -> None:
    with pytest.raises(ConfigError) as error, Native(engine, common() | change):
        pass
    for words in told:
        assert words in str(error.value)


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
def test_hashes_that_differ_in_each_process_are_refused(lab: Lab, algorithm: str) -> None:
    with (
        pytest.raises(ConfigError, match="--prefix-caching-hash-algo sha256"),
        Native(engine_config(lab.model, hash_algorithm=algorithm), settings("[::1]:1")),
    ):
        pass


def test_adapters_are_refused(lab: Lab) -> None:
    config = engine_config(lab.model)
    config.lora_config = LoRAConfig(max_lora_rank=8)
    with pytest.raises(ConfigError, match="--enable-lora"), Native(config, settings("[::1]:1")):
        pass


def test_images_are_refused(lab: Lab) -> None:
    config = engine_config(lab.model)
    config.model_config.multimodal_config = MultiModalConfig()
    with pytest.raises(ConfigError, match="--language-model-only"), Native(config, settings("[::1]:1")):
        pass
    config.model_config.multimodal_config = MultiModalConfig(language_model_only=True)
    with Native(config, settings("[::1]:1")):
        pass


def test_an_engine_that_says_nothing_of_itself_is_refused(engine: VllmConfig) -> None:
    spec = TieringOffloadingSpec(offloading_config(engine, settings("[::1]:1")))
    with pytest.raises(ConfigError, match="set_current_vllm_config"):
        spec.get_manager()
