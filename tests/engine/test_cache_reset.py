"""A reset makes the engine forget, whatever is under way; answers stay."""

import os
import signal
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from disk_rig import num_blocks
from engine_process import PATIENCE_S as PROCESS_PATIENCE_S
from engine_process import engine_process
from engine_process import until as until_true
from engine_rig import PATIENCE_S, MakeRig, RunningEngine, judge, rigs
from hierarchy_rig import Held, pool_tier
from kvtier.errors import ClosedError
from kvtier.tiers.base import Tier
from kvtier_engine.scheduling.completion import Completion
from kvtier_engine.scheduling.engine import Engine, EngineLimits
from kvtier_engine.scheduling.sampling_params import Sampling
from suspending import suspend
from tiny_model import prompt

TOKENS = prompt(41)

make_rig = pytest.fixture(rigs)
pool = pytest.fixture(pool_tier)


def test_the_device_forgets(make_rig: MakeRig) -> None:
    rig = make_rig(tiers=False)
    rig.ask(TOKENS)
    assert rig.scheduler.reset_cache() == 11
    assert rig.scheduler.reset_cache() == 0
    again = rig.ask(TOKENS)
    assert again.cached_by_tier == {}
    assert again.token_ids == judge(TOKENS)
    assert rig.ask(TOKENS).cached_by_tier == {"device": 40}, "what comes after the reset is cached as ever"


def test_host_memory_forgets_and_the_pool_does_not(make_rig: MakeRig, pool: Tier) -> None:
    alone = make_rig(num_blocks=20)
    alone.ask(TOKENS)
    alone.ask(prompt(60, seed=1))  # pushes the first off the device
    alone.scheduler.reset_cache()
    assert alone.ask(TOKENS).cached_by_tier == {}
    sharing = make_rig(shared=pool)
    sharing.ask(TOKENS)
    sharing.scheduler.reset_cache()
    assert sharing.ask(TOKENS).cached_by_tier == {"pool": 40}


@pytest.mark.parametrize("tiers", [False, True], ids=["device only", "with host memory"])
def test_running_requests_go_on_and_leave_nothing(make_rig: MakeRig, tiers: bool) -> None:
    rig = make_rig(tiers=tiers, max_batch_tokens=8)
    told: list[int] = []
    decoding = rig.add(TOKENS, 20, on_token=told.append)
    rig.run_until(lambda: len(told) == 6)
    prefilling = rig.add(prompt(30, seed=4), 8)
    rig.step()
    assert rig.scheduler.reset_cache() > 0
    rig.run()
    assert rig.done[decoding].token_ids == judge(TOKENS, 20)
    assert rig.done[prefilling].token_ids == judge(prompt(30, seed=4), 8)
    assert rig.ask(TOKENS).cached_by_tier == {}, "neither from before nor what followed from it"
    assert rig.ask(prompt(30, seed=4)).cached_by_tier == {}


def test_a_load_under_way_serves_its_request_and_nobody_else(make_rig: MakeRig, pool: Tier) -> None:
    make_rig(shared=pool).ask(TOKENS)
    held = Held(pool)
    rig = make_rig(shared=held)
    held.gate.clear()
    before = rig.add(TOKENS)
    rig.run_until(held.entered.is_set)
    assert rig.scheduler.reset_cache() == 0
    after = rig.add(TOKENS)  # does not wait for the load of the other
    rig.step()
    held.gate.set()
    rig.run()
    assert rig.done[before].token_ids == rig.done[after].token_ids == judge(TOKENS)
    assert rig.done[before].cached_by_tier == {"pool": 40}
    rig.scheduler.reset_cache()
    assert rig.ask(TOKENS).cached_by_tier == {"pool": 40}


def test_requests_that_wait_ask_again(make_rig: MakeRig, pool: Tier) -> None:
    make_rig(shared=pool).ask(TOKENS)
    held = Held(pool)
    rig = make_rig(shared=held)
    held.lookup_gate.clear()
    waiting = rig.add(TOKENS)
    rig.step()
    rig.scheduler.reset_cache()
    held.lookup_gate.set()
    rig.run()
    assert rig.done[waiting].cached_by_tier == {"pool": 40}
    assert rig.done[waiting].token_ids == judge(TOKENS)
    assert rig.ask(TOKENS).cached_by_tier == {"device": 40}, "it began after the reset"


def test_any_thread_may_reset_a_running_engine(make_rig: MakeRig, pool: Tier) -> None:
    answer: Future[Completion] = Future()
    forgotten: Future[int | None] = Future()
    refused: Future[int | None] = Future()
    with RunningEngine(make_rig(shared=pool)) as engine:
        engine.submit(TOKENS, Sampling(max_tokens=6), 0.0, answer.set_result)
        answer.result(PATIENCE_S)
        engine.reset_cache(forgotten.set_result)
        assert forgotten.result(PATIENCE_S) == 11
    with pytest.raises(ClosedError, match="stopping"):
        engine.reset_cache(refused.set_result)
    assert not refused.done()


def test_an_engine_that_ends_first_says_so(make_rig: MakeRig) -> None:
    rig = make_rig(tiers=False)
    engine = Engine(rig.scheduler, EngineLimits(max_total_tokens=100, vocab_size=61), hasher=rig.hasher)
    counts: list[int | None] = []
    engine.reset_cache(counts.append)
    engine.close()
    assert counts == [None]


ON_DISK = {
    "KVTIER__DISK__CAPACITY_BYTES": "256MiB",
    "KVTIER__ENGINE__NUM_THREADS": "1",
    "KVTIER__CACHE__LOAD_DEADLINE_S": "2",
    "KVTIER__POOL__CALL_TIMEOUT_S": "1",
}
WORDS = {"prompt": "one two three four five six seven eight nine ten " * 8, "max_tokens": 1}


def test_disk_forgets_although_its_process_hangs_and_the_stop_does_not_wait_for_it(tmp_path: Path) -> None:
    with engine_process(tmp_path, KVTIER__DISK__DIRECTORY=str(tmp_path / "blocks"), **ON_DISK) as engine:
        assert _cached(engine.complete(**WORDS)) == 0
        until_true(lambda: num_blocks(tmp_path / "blocks") > 4)
        hung = _tier_process(engine.process.pid)
        suspend(hung.pid)
        engine.post("/v1/cache/reset", {})
        until_true(lambda: num_blocks(tmp_path / "blocks") == 0)
        assert _cached(engine.complete(**WORDS)) == 0
        until_true(lambda: _tier_process(engine.process.pid).pid != hung.pid)
        suspend(_tier_process(engine.process.pid).pid)
        engine.process.send_signal(signal.SIGTERM)
        assert engine.process.wait(PROCESS_PATIENCE_S) == 0


def test_a_second_signal_ends_a_stop_at_once(tmp_path: Path) -> None:
    with engine_process(tmp_path, KVTIER__DISK__DIRECTORY=str(tmp_path / "blocks"), **ON_DISK) as engine:
        child = _tier_process(engine.process.pid)
        suspend(child.pid)
        engine.process.send_signal(signal.SIGTERM)
        until_true(lambda: not _listens(engine.client))
        os.kill(engine.process.pid, signal.SIGTERM)
        assert engine.process.wait(PROCESS_PATIENCE_S) == -signal.SIGTERM
        child.wait(PROCESS_PATIENCE_S)


def _cached(answer: dict[str, Any]) -> int:
    cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def _tier_process(engine: int) -> psutil.Process:
    until_true(lambda: bool(psutil.Process(engine).children()))
    return psutil.Process(engine).children()[0]


def _listens(client: httpx.Client) -> bool:
    try:
        return client.get("/metrics").status_code == 200
    except httpx.TransportError:
        return False
