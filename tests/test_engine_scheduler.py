"""The scheduler and its cache on a small real model: whatever is cached, fetched, lost or cancelled, answers stay."""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from engine_rig import (
    CONFIG,
    MODEL,
    PATIENCE_S,
    TOKENS_PER_BLOCK,
    EngineRig,
    RunningEngine,
    judge,
    prompt,
    shared_tier,
)
from hierarchy_rig import Held
from kvtier.errors import ClosedError, InvalidInputError, LimitExceededError
from kvtier.keys import StoreKey
from kvtier.tiers.base import Status, Tier
from kvtier_engine.engine import Engine, EngineLimits
from kvtier_engine.llama import Chunk, LlamaModel
from kvtier_engine.paged_kv import PagedKV, allocate_kv
from kvtier_engine.prefix_cache import PendingPolicy
from kvtier_engine.request import Completion, Sampling

MakeRig = Callable[..., EngineRig]


@pytest.fixture
def make_rig() -> Iterator[MakeRig]:
    rigs: list[EngineRig] = []

    def make(**settings: Any) -> EngineRig:
        rigs.append(EngineRig(**settings))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


@pytest.fixture
def pool() -> Iterator[Tier]:
    tier = shared_tier()
    yield tier
    tier.close()


def test_second_request_hits_the_device(make_rig: MakeRig) -> None:
    rig = make_rig(tiers=False)
    tokens = prompt(30)
    assert rig.ask(tokens).cached_by_tier == {}
    again = rig.ask(tokens)
    assert again.cached_by_tier == {"device": 28}
    assert again.token_ids == judge(tokens)
    assert rig.ask([*tokens[:17], 3]).cached_by_tier == {"device": 16}


def test_at_least_one_token_is_computed(make_rig: MakeRig) -> None:
    rig = make_rig(tiers=False)
    tokens = prompt(32)
    rig.ask(tokens)
    again = rig.ask(tokens)
    assert again.cached_by_tier == {"device": 28}
    assert again.token_ids == judge(tokens)


def test_answers_are_cached_too(make_rig: MakeRig) -> None:
    rig = make_rig(tiers=False)
    tokens = prompt(10)
    answer = rig.ask(tokens, 15).token_ids
    # 24 of the 25 tokens have KV: the last one was never computed.
    follow_up = [*tokens, *answer, 5, 6]
    done = rig.ask(follow_up)
    assert done.cached_by_tier == {"device": 24}
    assert done.token_ids == judge(follow_up)


def test_without_cache_nothing_is_shared(make_rig: MakeRig) -> None:
    rig = make_rig(tiers=False, cache=False)
    tokens = prompt(30)
    assert rig.ask(tokens).token_ids == rig.ask(tokens).token_ids
    assert rig.counter("engine_cached_tokens", tier="device") == 0


def test_another_engine_fetches_through_the_pool(make_rig: MakeRig, pool: Tier) -> None:
    tokens = prompt(41)
    first = make_rig(shared=pool)
    cold = first.ask(tokens)
    second = make_rig(shared=pool)
    warm = second.ask(tokens)
    assert warm.cached_by_tier == {"pool": 40}
    assert warm.token_ids == cold.token_ids == judge(tokens)
    assert second.ask(tokens).cached_by_tier == {"device": 40}
    other_secret = make_rig(shared=pool, secret=bytes(31) + b"x")
    assert other_secret.ask(tokens).cached_by_tier == {}


def test_fetched_blocks_are_bit_for_bit_what_was_saved(make_rig: MakeRig, pool: Tier) -> None:
    tokens = prompt(33)
    first, second = make_rig(shared=pool), make_rig(shared=pool)
    first.ask(tokens)
    second.ask(prompt(9, seed=5))  # so that its blocks have other ids
    second.ask(tokens)
    hashes = first.hasher.hash_blocks(tokens) if first.hasher else []
    ours, theirs = first.block_pool.match_prefix(hashes), second.block_pool.match_prefix(hashes)
    assert len(ours) == len(theirs) == 8
    assert ours != theirs
    assert torch.equal(first.kv.tensor[ours], second.kv.tensor[theirs])


def test_device_then_host_then_pool(make_rig: MakeRig, pool: Tier) -> None:
    tokens = prompt(49)
    make_rig(shared=pool).ask(tokens)
    rig = make_rig(shared=pool, num_blocks=20)
    rig.ask(tokens[:33])
    rig.ask(prompt(60, seed=1))  # pushes the prefix off the device, but not out of host memory
    rig.ask(tokens[:9])
    assert rig.ask(tokens).cached_by_tier == {"device": 8, "host": 24, "pool": 16}
    assert rig.done[4].token_ids == judge(tokens)


def test_failed_blocks_are_computed_from_the_first_one_on(make_rig: MakeRig, pool: Tier) -> None:
    tokens = prompt(41)
    rig = make_rig(shared=pool)
    rig.ask(tokens)
    hashes = rig.hasher.hash_blocks(tokens) if rig.hasher else []
    held = Held(pool)
    held.broken = {hashes[6], hashes[8]}
    second = make_rig(shared=held)
    done = second.ask(tokens)
    assert done.cached_by_tier == {"pool": 24}
    assert done.token_ids == judge(tokens)
    assert second.counter("degraded_fetches") == 1
    # What was computed instead is as good as what was fetched.
    assert second.ask(tokens).cached_by_tier == {"device": 40}


def test_one_load_serves_two_requests(make_rig: MakeRig, pool: Tier) -> None:
    tokens = prompt(41)
    make_rig(shared=pool).ask(tokens)
    held = Held(pool)
    # Nobody waits for blocks on their way to host memory: that alone would hide a second load.
    rig = make_rig(shared=held, pending=PendingPolicy(wait_s=0))
    held.gate.clear()
    first, second = rig.add(tokens), rig.add([*tokens[:30], 1, 2, 3])
    rig.run_until(held.entered.is_set)
    for _ in range(20):
        assert not rig.step()
    held.gate.set()
    rig.run()
    assert rig.done[first].cached_by_tier == {"pool": 40}
    assert rig.done[second].cached_by_tier == {"device": 28}
    assert rig.counter("blocks_loaded", tier="pool") == 10


def test_device_hits_lost_during_a_lookup_are_looked_up_too(make_rig: MakeRig, pool: Tier) -> None:
    tokens = prompt(41)
    make_rig(shared=pool).ask(tokens)
    held = Held(pool)
    rig = make_rig(shared=held, num_blocks=24)
    rig.ask(tokens[:25])
    held.lookup_gate.clear()
    request = rig.add(tokens)
    rig.step()
    greedy = rig.add([7], 90)  # takes every block for its answer; too short to look anything up
    rig.run_until(lambda: greedy in rig.done)
    assert rig.hasher is not None
    assert len(rig.block_pool.match_prefix(rig.hasher.hash_blocks(tokens))) < 6
    held.lookup_gate.set()
    rig.run()
    cached = rig.done[request].cached_by_tier
    assert sum(cached.values()) == 40
    assert cached["host"] > 0
    assert cached["pool"] == 16


def test_blocks_are_not_reused_while_they_are_copied(make_rig: MakeRig, pool: Tier) -> None:
    tokens = prompt(41)
    rig = make_rig(shared=pool, num_blocks=16)
    rig.device.gate.clear()
    first = rig.add(tokens)
    rig.run_until(lambda: first in rig.done)
    assert rig.block_pool.num_free == 16 - 11  # the 11 full blocks of 46 computed tokens
    second = rig.add(prompt(30, seed=1))
    for _ in range(20):
        assert not rig.step()
    rig.device.gate.set()
    rig.run()
    assert rig.done[second].token_ids == judge(prompt(30, seed=1))
    fetched = make_rig(shared=pool).ask(tokens)
    assert fetched.cached_by_tier == {"pool": 40}
    assert fetched.token_ids == judge(tokens)


def test_others_run_while_one_waits_for_the_pool(make_rig: MakeRig, pool: Tier) -> None:
    tokens = prompt(41)
    make_rig(shared=pool).ask(tokens)
    held = Held(pool)
    rig = make_rig(shared=held)
    held.lookup_gate.clear()
    waiting, passing = rig.add(tokens), rig.add([7])  # one token: no full block, so nothing to look up
    rig.run_until(lambda: passing in rig.done)
    assert waiting not in rig.done
    held.lookup_gate.set()
    rig.run()
    assert rig.done[waiting].cached_by_tier == {"pool": 40}


class BeingWritten(Held):
    """Answers PENDING for what it has until `written`: what a pool says while another engine sends the blocks."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.written = threading.Event()
        self.num_asked = 0

    def lookup(self, keys: Sequence[StoreKey]) -> list[Status]:
        self.num_asked += 1
        statuses = super().lookup(keys)
        return statuses if self.written.is_set() else [Status.PENDING if s is Status.HIT else s for s in statuses]


def test_pending_blocks_are_awaited(make_rig: MakeRig, pool: Tier) -> None:
    tokens = prompt(41)
    make_rig(shared=pool).ask(tokens)
    writing = BeingWritten(pool)
    rig = make_rig(shared=writing, pending=PendingPolicy(wait_s=PATIENCE_S, ask_every_s=0.001))
    request = rig.add(tokens)
    rig.run_until(lambda: writing.num_asked > 3)
    assert request not in rig.done
    writing.written.set()
    rig.run()
    assert rig.done[request].cached_by_tier == {"pool": 40}


def test_pending_blocks_are_not_awaited_for_long(make_rig: MakeRig, pool: Tier) -> None:
    tokens = prompt(41)
    make_rig(shared=pool).ask(tokens)
    rig = make_rig(shared=BeingWritten(pool))
    done = rig.ask(tokens)
    assert done.cached_by_tier == {}
    assert done.token_ids == judge(tokens)


@pytest.mark.parametrize("stage", ["queued", "lookup", "load", "prefill", "decode"])
def test_cancelled_requests_give_everything_back(make_rig: MakeRig, pool: Tier, stage: str) -> None:
    tokens = prompt(41)
    make_rig(shared=pool).ask(tokens)
    held = Held(pool)
    rig = make_rig(shared=held, max_batch_tokens=8)
    mine = prompt(41, seed=9) if stage in ("prefill", "decode") else tokens
    if stage == "lookup":
        held.lookup_gate.clear()
    if stage == "load":
        held.gate.clear()
    request = rig.add(mine, max_tokens=20)
    if stage == "lookup":
        rig.step()
    elif stage == "load":
        rig.run_until(held.entered.is_set)
    elif stage == "prefill":
        rig.run_until(rig.step)
    elif stage == "decode":
        rig.run_until(lambda: rig.counter("engine_answer_tokens") == 0 and _num_tokens(rig) > 43)
    rig.scheduler.cancel(request)
    assert rig.done[request].finish_reason == "cancelled"
    assert (len(rig.done[request].token_ids) > 0) == (stage == "decode")
    rig.scheduler.cancel(request)  # once more changes nothing
    held.lookup_gate.set()
    held.gate.set()
    rig.run()
    assert rig.block_pool.num_free == rig.block_pool.num_blocks
    assert rig.ask(tokens).token_ids == judge(tokens)


def _num_tokens(rig: EngineRig) -> int:
    return sum(len(request.tokens) for request in rig.scheduler._running)


class _Recorder:
    """The model, keeping what it was asked for."""

    def __init__(self, model: LlamaModel) -> None:
        self.model = model
        self.steps: list[list[int]] = []

    def forward(self, chunks: Any, kv: PagedKV) -> Tensor:
        self.steps.append([len(chunk.token_ids) for chunk in chunks])
        return self.model.forward(chunks, kv)


def test_decodes_come_first_and_prefills_in_chunks(make_rig: MakeRig) -> None:
    rig = make_rig(tiers=False, max_batch_tokens=10)
    recorder = _Recorder(MODEL)
    rig.scheduler._model = recorder
    tokens = [prompt(5, seed=1), prompt(23, seed=2)]
    for each in tokens:
        rig.add(each, max_tokens=4)
    rig.run()
    assert recorder.steps[:4] == [[5, 5], [1, 9], [1, 9], [1, 1]]
    assert max(sum(step) for step in recorder.steps) <= 10
    assert [rig.done[i + 1].token_ids for i in range(2)] == [judge(each, 4) for each in tokens]


def test_tokens_are_told_one_by_one_before_the_end(make_rig: MakeRig) -> None:
    """Each once and in order, also to requests that lose their blocks and start again."""
    rig = make_rig(tiers=False, num_blocks=16)
    told: list[list[int]] = [[], [], []]
    ids = [rig.add(prompt(20, seed=i), 24, on_token=told[i].append) for i in range(3)]
    silent = rig.add(prompt(5), 4)
    rig.run_until(lambda: len(told[0]) == 3)
    assert not rig.done
    rig.run()
    assert rig.counter("engine_preemptions") > 0
    assert [tuple(each) for each in told] == [rig.done[i].token_ids for i in ids]
    assert rig.done[silent].token_ids == judge(prompt(5), 4)


def test_a_requester_may_find_the_answer_complete(make_rig: MakeRig) -> None:
    rig = make_rig(tiers=False)
    told: list[int] = []
    request = rig.add(prompt(9), 200, on_token=told.append)
    rig.run_until(lambda: len(told) == 15)
    rig.scheduler.cancel(request, "stop")
    assert rig.done[request].finish_reason == "stop"
    assert rig.done[request].token_ids == tuple(told)
    assert rig.ask([*prompt(9), *told]).cached_by_tier == {"device": 20}, "its blocks stay findable"


def test_more_requests_than_may_run_wait_their_turn(make_rig: MakeRig) -> None:
    rig = make_rig(tiers=False, max_running=2)
    ids = [rig.add(prompt(10, seed=i)) for i in range(5)]
    rig.step()
    assert len(rig.scheduler._running) == 2
    rig.run()
    assert list(rig.done) == ids
    assert all(rig.done[i + 1].token_ids == judge(prompt(10, seed=i)) for i in range(5))


@pytest.mark.parametrize("tiers", [False, True], ids=["device only", "with host memory"])
def test_preempted_requests_start_again_and_answer_the_same(make_rig: MakeRig, tiers: bool) -> None:
    rig = make_rig(tiers=tiers, num_blocks=16)
    prompts = [prompt(20, seed=i) for i in range(3)]
    for each in prompts:
        rig.add(each, max_tokens=24)
    rig.run()
    assert rig.counter("engine_preemptions") > 0
    for index, each in enumerate(prompts):
        done = rig.done[index + 1]
        assert done.token_ids == judge(each, 24)
        assert done.cached_by_tier == {}, "what a request computed itself is not a hit"


def test_blocks_that_could_not_be_saved_are_copied_before_they_are_overwritten(make_rig: MakeRig, pool: Tier) -> None:
    held = Held(pool)
    rig = make_rig(shared=held, num_blocks=24, num_slots=32, clean_ahead_blocks=24)
    assert rig.hierarchy is not None
    held.gate.clear()
    tokens = [prompt(50), prompt(30, seed=7)]
    ids = [rig.add(each) for each in tokens]
    rig.run_until(lambda: len(rig.done) == len(ids))
    assert rig.counter("saves_dropped") > 0
    held.gate.set()
    rig.run()
    hierarchy = rig.hierarchy
    rig.run_until(lambda: all(hierarchy.holds(chain_hash) for chain_hash, _ in rig.block_pool.coldest(24)))
    rig.ask(prompt(80, seed=8), 1)
    assert rig.counter("device_evictions", state="clean") > 0
    assert rig.counter("device_evictions", state="dropped") == 0


def test_seeded_sampling_repeats_and_other_seeds_differ(make_rig: MakeRig) -> None:
    rig = make_rig(tiers=False)
    answers = []
    for seed in (1, 1, 2):
        request = rig.add(prompt(9), 30, temperature=1.0, seed=seed)
        rig.run()
        answers.append(rig.done[request].token_ids)
    assert answers[0] == answers[1] != answers[2]


def test_temperature_draws_from_the_model(make_rig: MakeRig) -> None:
    """Frequencies of first tokens against the softmax, by a chi-square bound that fails once in a million."""
    kv = allocate_kv(CONFIG, 4, TOKENS_PER_BLOCK, torch.float32)
    tokens, draws, temperature = prompt(9), 400, 1.5
    expected = torch.softmax(MODEL.forward([Chunk(tokens, 0, [0, 1, 2])], kv)[0] / temperature, -1) * draws
    rig = make_rig(tiers=False)
    ids = [rig.add(tokens, 1, temperature=temperature, seed=i) for i in range(draws)]
    rig.run()
    seen = torch.bincount(torch.tensor([rig.done[i].token_ids[0] for i in ids]), minlength=expected.numel())
    common = expected >= 5
    observed = torch.cat((seen[common], seen[~common].sum()[None])).double()
    wanted = torch.cat((expected[common], expected[~common].sum()[None])).double()
    chi_square = ((observed - wanted).square() / wanted.clamp(min=1e-9)).sum().item()
    freedom = observed.numel() - 1
    assert chi_square < freedom + 2 * (freedom * 13.8) ** 0.5 + 2 * 13.8  # Laurent and Massart, p = e^-13.8


@pytest.mark.parametrize("temperature", [1e-40, 1e-300, 5e-324])
def test_the_smallest_temperatures_take_the_likeliest_token(make_rig: MakeRig, temperature: float) -> None:
    rig = make_rig(tiers=False)
    request = rig.add(prompt(9), 5, temperature=temperature)
    rig.run()
    assert rig.done[request].token_ids == judge(prompt(9), 5)


def test_eos_ends_an_answer_and_is_its_last_token(make_rig: MakeRig) -> None:
    tokens = prompt(12)
    full = judge(tokens, 12)
    stop = next(token for token in full if full.index(token) >= 2)
    done: list[Completion] = []
    rig = make_rig(tiers=False)
    with RunningEngine(rig) as engine:
        ended = threading.Event()
        sampling = Sampling(max_tokens=12, eos_token_ids=(stop,))
        engine.submit(tokens, sampling, 0.0, lambda c: (done.append(c), ended.set())[0])
        assert ended.wait(PATIENCE_S)
    assert done[0].token_ids == full[: full.index(stop) + 1]
    assert done[0].finish_reason == "stop"


@pytest.mark.parametrize("seed", range(6))
def test_random_traffic_never_changes_an_answer(make_rig: MakeRig, pool: Tier, seed: int) -> None:
    """Prefix-sharing requests, small memories, broken blocks, cancellations, resets: two engines over one pool."""
    rng = random.Random(seed)
    held = Held(pool)
    rigs = [
        make_rig(shared=held, num_blocks=24, num_slots=rng.choice([16, 40]), clean_ahead_blocks=rng.choice([0, 8]),
                 max_batch_tokens=rng.choice([7, 64]), max_running=rng.choice([2, 8]))
        for _ in range(2)
    ]  # fmt: skip
    documents = [prompt(40, seed=100 + i) for i in range(3)]
    asked: list[tuple[EngineRig, int, list[int], int]] = []
    cancelled: set[tuple[int, int]] = set()
    for _ in range(40):
        rig = rng.choice(rigs)
        tokens = rng.choice(documents)[: rng.randrange(1, 41)] + prompt(rng.randrange(1, 6), seed=rng.randrange(4))
        max_tokens = rng.randrange(1, 9)
        asked.append((rig, rig.add(tokens, max_tokens), tokens, max_tokens))
        if rng.random() < 0.3 and rig.hasher is not None:
            held.broken = set(rng.sample(rig.hasher.hash_blocks(rng.choice(documents)), 3))
        if rng.random() < 0.2:
            rig, request_id, _, _ = rng.choice(asked)
            rig.scheduler.cancel(request_id)
            cancelled.add((id(rig), request_id))
        if rng.random() < 0.1:
            rng.choice(rigs).scheduler.reset_cache()
        for each in rigs:
            for _ in range(rng.randrange(4)):
                each.step()
            each.block_pool.check()
    for rig in rigs:
        rig.run()
    for rig, request_id, tokens, max_tokens in asked:
        done, full = rig.done[request_id], judge(tokens, max_tokens)
        if done.finish_reason == "cancelled":
            assert (id(rig), request_id) in cancelled
            assert done.token_ids == full[: len(done.token_ids)]
        else:
            assert done.token_ids == full, f"seed {seed}"


class Broken:
    """A model whose every step fails."""

    def forward(self, chunks: Any, kv: PagedKV) -> Tensor:
        raise RuntimeError("the memory is on fire")


def test_engine_refuses_what_can_never_run(make_rig: MakeRig) -> None:
    with RunningEngine(make_rig(tiers=False)) as engine:
        ignore: Callable[[Completion], None] = lambda completion: None  # noqa: E731
        with pytest.raises(LimitExceededError, match=r"95 prompt tokens and max_tokens 6 .* 100 tokens"):
            engine.submit(prompt(95), Sampling(max_tokens=6), 0.0, ignore)
        with pytest.raises(InvalidInputError, match="empty"):
            engine.submit([], Sampling(max_tokens=6), 0.0, ignore)
        for wrong in (-1, CONFIG.vocab_size):
            with pytest.raises(InvalidInputError, match="token ids"):
                engine.submit([3, wrong], Sampling(max_tokens=6), 0.0, ignore)
    with pytest.raises(ClosedError):
        engine.submit([1], Sampling(max_tokens=6), 0.0, ignore)


@pytest.mark.parametrize("num_blocks", [8, 7], ids=["the model", "the memory"])
def test_engine_names_the_limit_that_counts(make_rig: MakeRig, num_blocks: int) -> None:
    rig = make_rig(tiers=False, num_blocks=num_blocks)
    limits = EngineLimits.of(max_positions=8 * TOKENS_PER_BLOCK, kv=rig.kv, vocab_size=CONFIG.vocab_size)
    assert limits.max_total_tokens == num_blocks * TOKENS_PER_BLOCK
    engine = Engine(rig.scheduler, limits, hasher=None)
    with pytest.raises(LimitExceededError) as caught:
        engine.submit(prompt(limits.max_total_tokens), Sampling(max_tokens=1), 0.0, lambda completion: None)
    assert ("the model's own context" in str(caught.value)) == (num_blocks == 8)
    assert ("raise engine.kv_bytes" in str(caught.value)) == (num_blocks == 7)


def test_engine_serves_many_threads_and_stop_cancels_the_rest(make_rig: MakeRig, pool: Tier) -> None:
    rig = make_rig(shared=pool)
    done: dict[int, Completion] = {}
    with RunningEngine(rig) as engine:

        def client(seed: int) -> None:
            ended = threading.Event()

            def on_done(completion: Completion) -> None:
                done[seed] = completion
                ended.set()

            engine.submit(prompt(20 + seed, seed=seed % 3), Sampling(max_tokens=5), 0.0, on_done)
            assert ended.wait(PATIENCE_S)

        threads = [threading.Thread(target=client, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        last: list[Completion] = []
        engine.submit(prompt(20), Sampling(max_tokens=80), 0.0, last.append)
    assert all(done[seed].token_ids == judge(prompt(20 + seed, seed=seed % 3), 5) for seed in range(8))
    assert [completion.finish_reason for completion in last] in (["cancelled"], ["length"])


def test_a_failing_step_ends_every_request_and_the_engine_says_so() -> None:
    rig = EngineRig(tiers=False)
    running = RunningEngine(rig)
    rig.scheduler._model = Broken()
    done: list[Completion] = []
    ended = threading.Event()
    with running as engine:
        engine.submit([1, 2], Sampling(max_tokens=3), 0.0, lambda c: (done.append(c), ended.set())[0])
        assert ended.wait(PATIENCE_S)
        assert not engine.healthy
        with pytest.raises(ClosedError, match="failed"):
            engine.submit([1], Sampling(max_tokens=3), 0.0, done.append)
    assert [completion.finish_reason for completion in done] == ["failed"]
    assert len(running.errors) == 1
