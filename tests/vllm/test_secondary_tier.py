"""The cache pool as a secondary tier of vLLM's native offloading: by hand below its real manager, and in an engine."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_lab import Lab
from native_rig import (
    HASTE,
    ListeningPool,
    Native,
    content,
    engine_config,
    key,
    listening_pool,
    named,
    set_environment,
    settings,
)
from vllm.config import VllmConfig
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm_rig import BLOCK, Answer, cached_of, make_prompts, none_hit, tokens_of

import kvtier_vllm.secondary_tier
from cache_pool import CachePool
from garbling_proxy import GarblingProxy

CHUNKS = range(6)
CONTENTS = [content(number) for number in CHUNKS]
PROMPTS = make_prompts()


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_environment(monkeypatch, tmp_path)


@pytest.fixture(scope="module")
def engine(lab: Lab) -> VllmConfig:
    return engine_config(lab.model)


@pytest.fixture(params=["unix", "tcp"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ListeningPool]:
    """A pool that shares its memory, or one at the other end of a network."""
    listen = f"unix:{tmp_path}/pool.sock" if request.param == "unix" else "127.0.0.1:0"
    with listening_pool(tmp_path, listen) as running:
        yield running


@pytest.fixture
def tcp_server(tmp_path: Path) -> Iterator[ListeningPool]:
    with listening_pool(tmp_path) as running:
        yield running


def test_what_the_primary_tier_loses_comes_back(engine: VllmConfig, server: ListeningPool) -> None:
    with Native(engine, settings(server.address)) as native:
        native.store(CHUNKS)
        native.empty()
        assert native.load(CHUNKS) == CONTENTS
        native.await_count(len(CHUNKS), "blocks", "write", "stored")
        native.await_count(len(CHUNKS), "blocks", "read", "hit")
        native.store(CHUNKS)
        assert native.load([*CHUNKS, 99]) == CONTENTS, "up to the first that nobody has"


@pytest.mark.parametrize("server", ["unix"], indirect=True)
def test_chunks_that_crowd_one_another_out(engine: VllmConfig, server: ListeningPool) -> None:
    """Four times as many as the primary tier holds."""
    with Native(engine, settings(server.address)) as native:
        for start in range(0, 64, 8):
            native.store(range(start, start + 8))
        for start in range(0, 64, 8):
            numbers = range(start, start + 8)
            assert native.load(numbers) == [content(number) for number in numbers]


def test_another_engine_finds_them(engine: VllmConfig, server: ListeningPool) -> None:
    with Native(engine, settings(server.address)) as first, Native(engine, settings(server.address)) as second:
        first.store(CHUNKS)
        request = second.begin()
        second.await_promotion((request, CHUNKS))
        assert second.await_found(CHUNKS, request) == list(CHUNKS)
        assert second.load(CHUNKS) == CONTENTS
        second.store(CHUNKS)
        second.await_count(0, "blocks", "write", "stored")


def test_where_tokens_came_from(engine: VllmConfig, tcp_server: ListeningPool) -> None:
    assert kvtier_vllm.secondary_tier.KvtierTier.cache_hit_source is CacheHitSource.EXTERNAL_UNSPECIFIED
    with Native(engine, settings(tcp_server.address)) as native:
        native.store([1])
        native.empty()
        request = native.begin()
        native.await_found([1], request)
        assert native.manager.get_load_source(key(1), request) is CacheHitSource.EXTERNAL_UNSPECIFIED


def test_a_request_that_wants_nothing_stored(engine: VllmConfig, tcp_server: ListeningPool) -> None:
    with Native(engine, settings(tcp_server.address)) as native:
        assert native.begin_store([1], {"kvtier": {"no_store": True}})
        assert native.begin_store([2], {"kvtier": "nonsense"})
        native.settle()
        native.empty()
        assert native.load([1]) == []
        assert native.load([2]) == [content(2)]


def test_a_pool_that_is_not_there(engine: VllmConfig, tmp_path: Path) -> None:
    with Native(engine, settings(f"unix:{tmp_path}/nobody.sock")) as native:
        native.store(CHUNKS)
        assert native.load(CHUNKS) == CONTENTS, "the primary tier works without"
        native.empty()
        assert native.load(CHUNKS) == []
        native.await_count(0, "blocks", "write", "stored")


def test_a_pool_that_is_killed_before_a_load(engine: VllmConfig, server: ListeningPool) -> None:
    with Native(engine, settings(server.address)) as native:
        native.store(CHUNKS)
        native.empty()
        request = native.begin()
        native.await_promotion((request, CHUNKS))
        server.kill()
        assert native.await_found(CHUNKS, request) in ([], list(CHUNKS)), "shared memory may outlive its pool"
        native.store(range(10, 14))
        native.empty()
        assert native.load(range(10, 14)) == []


def test_a_pool_that_stops_before_a_load(engine: VllmConfig, server: ListeningPool) -> None:
    """The job fails, its request computes, and the next one hits when the pool is back."""
    with Native(engine, settings(server.address, client=HASTE)) as native:
        native.store(CHUNKS)
        native.empty()
        request = native.begin()
        native.await_promotion((request, CHUNKS))
        server.suspend()
        assert native.await_found(CHUNKS, request) == []
        assert native.look(CHUNKS, request) == [LookupResult.MISS], "not offered again"
        native.settle()
        assert native.load(CHUNKS) == [], "lookups too have a deadline"
        server.resume()
        native.until_back(lambda: native.load(CHUNKS) == CONTENTS)


@pytest.mark.parametrize("server", ["unix"], indirect=True)
def test_a_pool_that_stops_before_stores(engine: VllmConfig, server: ListeningPool) -> None:
    """Half of the primary tier may wait for it; what is beyond is dropped, so that loads have room."""
    with Native(engine, settings(server.address, client=HASTE)) as native:
        native.store([0])
        server.suspend()
        assert all(native.begin_store([number]) for number in range(1, 15))
        assert native.count("blocks", "write", "dropped") == 0
        native.step()
        assert native.count("blocks", "write", "dropped") == 6
        native.empty()
        assert not native.manager.has_pending_work(), "draining has ended all jobs"
        server.resume()


@pytest.mark.parametrize("server", ["tcp"], indirect=True)
def test_draining_in_the_middle_of_loads(engine: VllmConfig, server: ListeningPool) -> None:
    with Native(engine, settings(server.address, client=HASTE)) as native:
        native.store(CHUNKS)
        native.empty()
        asked = [(native.begin(), [start, start + 1]) for start in range(0, len(CHUNKS), 2)]
        native.await_promotion(*asked)
        server.suspend()
        native.step()
        native.empty()
        assert not native.manager.has_pending_work()
        for request, numbers in asked:
            assert native.look(numbers, request) == [LookupResult.MISS]
        server.resume()
        native.until_back(lambda: native.load(CHUNKS) == CONTENTS)


@pytest.mark.parametrize("server", ["unix"], indirect=True)
def test_shutting_down_in_the_middle_of_jobs(engine: VllmConfig, server: ListeningPool) -> None:
    with Native(engine, settings(server.address, client=HASTE)) as native:
        native.store(CHUNKS)
        native.empty()
        native.await_promotion((native.begin(), CHUNKS))
        server.suspend()
        native.step()
        native.begin_store([20])


def test_a_garbled_chunk_is_a_failed_job(engine: VllmConfig, tcp_server: ListeningPool) -> None:
    proxy = GarblingProxy(tcp_server.address)
    with proxy.running() as address, Native(engine, settings(address)) as native:
        native.store([0])
        native.empty()
        request = native.begin()
        native.await_promotion((request, [0]))
        proxy.garbles.set()
        assert native.await_found([0], request) == []
        assert proxy.num_garbled == 1
        assert native.look([0], request) == [LookupResult.MISS], "not offered again, or it would go on for ever"
        native.await_count(1, "corrupt_blocks")
        assert native.load([0]) == [content(0)]


def test_of_a_job_that_fails_in_part_the_rest_counts(engine: VllmConfig, tcp_server: ListeningPool) -> None:
    proxy = GarblingProxy(tcp_server.address)
    with proxy.running() as address, Native(engine, settings(address)) as native:
        native.store(CHUNKS)
        native.empty()
        request = native.begin()
        native.await_promotion((request, CHUNKS))
        proxy.garbles.set()
        found = native.await_found(CHUNKS, request)
        assert len(found) < len(CHUNKS)
        native.await_count(len(CHUNKS) - 1, "blocks", "read", "hit")


def native(pool: CachePool) -> dict[str, Any]:
    """What users give as `--kv-transfer-config`, but for the worker that copies."""
    extra = {
        "spec_name": "HostTieringSpec",
        "spec_module_path": "kvtier_bench.vllm.native_tiering",
        "cpu_bytes_to_use": 64 << 20,
        # Once the pool is away, it does not come back.
        "secondary_tiers": [named(settings(pool.address, client=HASTE | {"breaker_open_s": 600.0}))],
    }
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def test_real_engines_share(lab: Lab, expected: list[Answer], pool: CachePool) -> None:
    """Until the pool stops, and dies: then they compute."""
    with lab.engine(native(pool)) as engine:
        answers = engine.generate(PROMPTS)
        assert tokens_of(answers) == tokens_of(expected)
        assert cached_of(answers) == none_hit(PROMPTS)
        pool.await_written(sum(len(prompt) // BLOCK for prompt in PROMPTS))
    with lab.engine(native(pool), processes=True) as engine:
        answers = engine.generate(PROMPTS)
        assert tokens_of(answers) == tokens_of(expected)
        assert cached_of(answers) == [len(prompt) // BLOCK * BLOCK for prompt in PROMPTS]
        assert cached_of(engine.generate(PROMPTS, salt="other")) == none_hit(PROMPTS)
        assert engine.counter("vllm:kvtier_tier_blocks") > 0
        for strike in (pool.suspend, pool.kill):
            strike()
            engine.reset(connector=True)
            answers = engine.generate(PROMPTS)
            assert tokens_of(answers) == tokens_of(expected)
            assert cached_of(answers) == none_hit(PROMPTS)
