"""What comes back from a pool process is bit for bit what went in, and so are the logits computed from it."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from hierarchy_rig import until
from kvtier.build.engine_cache import EngineCache, engine_cache
from kvtier.config import Config, parse_config
from kvtier.device.kv import HostMemoryKV
from kvtier.system.processes import Service
from kvtier_engine.demo.demo_model import demo_model_path
from kvtier_engine.demo.document import age_of, asking, people
from kvtier_engine.demo.stage import Stage
from kvtier_engine.model.llama import Chunk, LlamaModel
from kvtier_engine.model.model_folder import open_model
from kvtier_engine.model.paged_kv import PagedKV, allocate_kv, kv_namespace
from kvtier_engine.model.weights import load_weights

TOKENS_PER_BLOCK = 16
NUM_BLOCKS = 80
PROMPT_TOKENS = 1000
DTYPE = torch.bfloat16


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage.prepare(tmp_path, demo_model_path(), "bfloat16")


@pytest.fixture
def pool(stage: Stage) -> Iterator[Service]:
    with stage.pool() as service:
        yield service


def configured(stage: Stage, address: str) -> Config:
    tenants = {"red": {"secret": "env:DEMO_RED_SECRET", "token": "env:DEMO_RED_TOKEN"}}
    data = {"tenant": "red", "tenants": tenants, "pool": {"address": address}}
    return parse_config(data, source="test", environ=dict(stage.environ))


def transfer(cache: EngineCache, kind: str, blocks: list[tuple[bytes, int]]) -> None:
    start = cache.hierarchy.start_save if kind == "save" else cache.hierarchy.start_load
    job_id = start(blocks)  # type: ignore[arg-type]
    result = until(lambda: next((r for r in cache.hierarchy.poll() if r.job_id == job_id), None))
    assert not result.failed
    assert kind == "save" or set(result.tiers) == {"pool"}


def test_logits_after_a_pool_hit_equal_logits_after_a_device_hit(stage: Stage, pool: Service, tmp_path: Path) -> None:
    address = pool.ready()["block"]
    cache_dir = Path(os.environ.get("KVTIER__ENGINE__MODEL_CACHE_DIR", tmp_path / "models"))
    folder = open_model(demo_model_path(), cache_dir)
    model = LlamaModel(folder.config, load_weights(folder.weight_files, folder.config, DTYPE))
    tokens = folder.tokenizer.encode_chat(asking(people(), age_of(people()[3])))[:PROMPT_TOKENS]
    namespace = kv_namespace(folder.config, folder.weights_digest, DTYPE)
    num_cached = (len(tokens) - 1) // TOKENS_PER_BLOCK
    cached_tokens = num_cached * TOKENS_PER_BLOCK

    def kv_memory(poison: float) -> PagedKV:
        kv = allocate_kv(folder.config, NUM_BLOCKS, TOKENS_PER_BLOCK, DTYPE)
        kv.tensor.fill_(poison)
        return kv

    def finish(kv: PagedKV, table: list[int]) -> torch.Tensor:
        return model.forward([Chunk(tokens[cached_tokens:], cached_tokens, table)], kv)

    first = kv_memory(float("nan"))
    table = list(range(num_cached + 1))
    model.forward([Chunk(tokens[:cached_tokens], 0, table)], first)
    with engine_cache(
        configured(stage, address),
        device=HostMemoryKV(first.byte_rows().numpy()),
        namespace=namespace,
        registry=CollectorRegistry(),
    ) as cache:
        hashes = cache.hashers["red"].hash_blocks(np.asarray(tokens[:cached_tokens], dtype=np.int32))
        assert len(hashes) == num_cached
        transfer(cache, "save", list(zip(hashes, table, strict=False)))
    device_hit = finish(first, table)

    second = kv_memory(float("nan"))
    elsewhere = [NUM_BLOCKS - 1 - block for block in table]
    with engine_cache(
        configured(stage, address),
        device=HostMemoryKV(second.byte_rows().numpy()),
        namespace=namespace,
        registry=CollectorRegistry(),
    ) as cache:
        transfer(cache, "load", list(zip(hashes, elsewhere, strict=False)))
    saved = first.byte_rows()[table[:num_cached]]
    fetched = second.byte_rows()[elsewhere[:num_cached]]
    assert torch.equal(saved, fetched), "bytes fetched equal bytes saved"
    pool_hit = finish(second, elsewhere)
    assert torch.isfinite(pool_hit).all()
    assert torch.equal(device_hit, pool_hit), "bit for bit"
