"""Windowed layers have blocks of their own: a hit needs, loads and holds what the window sees, and nothing is wrong."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from random import Random

import msgpack
import pytest
import torch

from clock_rig import StillClock
from engine_rig import NAMESPACE, TOKENS_PER_BLOCK, EngineRig, MakeRig, rigs
from hierarchy_rig import Held, pool_tier
from kvtier.identity.keys import BlockHasher, BlockKey, PrefixHasher, PreviousHasher, rank_keys, tenant_id
from kvtier.offload import BlockStatus
from kvtier.offload.planner import MISSING
from kvtier.tiers.base import Status, Tier
from kvtier_engine.events.event_form import external_hash
from kvtier_engine.events.kv_events import KVEvents
from kvtier_engine.model.kv_groups import ONE_GROUP, KVGroups
from kvtier_engine.model.paged_kv import kv_namespace
from kvtier_engine.scheduling.engine import EngineLimits
from kvtier_engine.scheduling.fetch_planning import FetchPlanning
from kvtier_engine.scheduling.request import NO_BLOCK, Request, keys_of_groups
from kvtier_engine.scheduling.sampling_params import Sampling
from naive_answers import naive_answer
from tiny_model import CONFIG, WINDOWED_CONFIG, WINDOWED_MODEL, prompt

make_any_rig = pytest.fixture(rigs)
pool = pytest.fixture(pool_tier)
SEEN, AHEAD, NUM_WINDOWED = 3, 3, 2
"""Blocks of 4 tokens that a window of 10 sees before a block, and has room for behind it."""


@pytest.fixture
def make_rig(make_any_rig: MakeRig) -> MakeRig:
    return partial(make_any_rig, model=WINDOWED_MODEL, num_blocks=150, num_slots=192)


def judge(tokens: list[int], max_tokens: int = 6) -> tuple[int, ...]:
    return naive_answer(tokens, Sampling(max_tokens=max_tokens), model=WINDOWED_MODEL)[0]


def key_of(rig: EngineRig, tokens: list[int], position: int, group: int) -> BlockKey:
    assert rig.hasher is not None
    return keys_of_groups(rig.hasher.hash_blocks(tokens)[position], NUM_WINDOWED)[group]


def forget(pool: Tier, *keys: BlockKey) -> None:
    assert pool.discard(rank_keys(keys, NAMESPACE)) == len(keys)


def test_what_windows_do_not_see_is_not_loaded(make_rig: MakeRig, pool: Tier) -> None:
    tokens = prompt(81)
    first = make_rig(shared=pool)
    assert first.ask(tokens).token_ids == judge(tokens)
    second = make_rig(shared=pool)
    done = second.ask(tokens)
    assert (done.token_ids, done.cached_by_tier) == (judge(tokens), {"pool": 80})
    assert second.counter("loaded_blocks", tier="pool") == 20 + NUM_WINDOWED * SEEN
    # A prefix of it is another one's end: of its window, nothing was loaded.
    assert second.ask([*tokens[:50], 1]).token_ids == judge([*tokens[:50], 1])
    assert second.done[2].cached_by_tier == {"pool": 12, "device": 36}, "full layers had all of it on the device"
    assert second.counter("loaded_blocks", tier="pool") == 20 + 2 * NUM_WINDOWED * SEEN


def test_the_longest_prefix_whose_window_is_there_wins(make_rig: MakeRig, pool: Tier) -> None:
    tokens = prompt(81)
    rig = make_rig(shared=pool)
    rig.ask(tokens)
    forget(pool, key_of(rig, tokens, 18, 2), key_of(rig, tokens, 13, 1), key_of(rig, tokens, 3, 1))
    second = make_rig(shared=pool)
    assert second.ask(tokens).cached_by_tier == {"pool": 72}, "blocks 15 to 17 are there, 18 and 13 are not"
    forget(pool, key_of(rig, tokens, 16, 1), key_of(rig, tokens, 7, 0))
    third = make_rig(shared=pool)
    done = third.ask(tokens)
    assert (done.token_ids, done.cached_by_tier) == (judge(tokens), {"pool": 28}), "full layers lack block 7"
    forget(pool, key_of(rig, tokens, 4, 2), key_of(rig, tokens, 7, 0))
    fourth = make_rig(shared=pool)
    done = fourth.ask(tokens)
    assert (done.token_ids, done.cached_by_tier) == (judge(tokens), {"pool": 12}), (
        "3 and 4 are missing: 0 to 2 are left"
    )


def test_a_window_that_fails_to_load_is_computed(make_rig: MakeRig, pool: Tier) -> None:
    tokens = prompt(81)
    rig = make_rig(shared=pool)
    rig.ask(tokens)
    for position, group in ((18, 1), (19, 2), (5, 0), (0, 0)):
        held = Held(pool)
        held.broken = {key_of(rig, tokens, position, group)}
        other = make_rig(shared=held)
        done = other.ask(tokens)
        assert (done.token_ids, done.cached_by_tier) == (judge(tokens), {})
        again = other.ask(tokens)
        assert (again.token_ids, again.cached_by_tier) == (judge(tokens), {"device": 80})


def test_a_sequence_holds_its_window_alone(make_rig: MakeRig) -> None:
    """Whatever it computes in a step, and with the whole of what it leaves behind findable."""
    tokens, most = prompt(150), [0]
    rig = make_rig(tiers=False, cache_aware=True)
    asked = rig.add(tokens, 60)

    def is_over() -> bool:
        for request in rig.scheduler.requests.running:
            for table in request.windowed:
                most.append(sum(block != NO_BLOCK for block in table))
        return asked in rig.done

    rig.run_until(is_over)
    assert max(most) == SEEN + 1 + AHEAD
    assert rig.done[asked].token_ids == judge(tokens, 60)
    longer = [*tokens, *rig.done[asked].token_ids, 1]
    assert rig.ask(longer).cached_by_tier == {"device": 208}
    assert rig.done[asked + 1].token_ids == judge(longer)


def test_windows_that_the_device_has_lost_come_from_host_memory(make_rig: MakeRig) -> None:
    tokens = prompt(81)
    rig = make_rig()
    rig.ask(tokens)
    assert rig.hasher is not None
    full = rig.block_pool.match_prefix(rig.hasher.hash_blocks(tokens))
    rig.block_pool.acquire(full)
    taken = rig.block_pool.allocate(rig.block_pool.num_free)
    assert taken is not None
    rig.block_pool.free([*taken, *full])
    done = rig.ask(tokens)
    assert (done.token_ids, done.cached_by_tier) == (judge(tokens), {"device": 68, "host": 12})
    assert rig.counter("loaded_blocks", tier="host") == NUM_WINDOWED * SEEN


def test_prompts_of_before_a_rotation_are_found_in_all_groups(make_rig: MakeRig, pool: Tier) -> None:
    tokens = prompt(41)
    make_rig(shared=pool).ask(tokens)
    moving = make_rig(shared=pool)
    old, new = (BlockHasher(tenant_id("red"), PrefixHasher(of, "", TOKENS_PER_BLOCK)) for of in (bytes(32), b"n" * 32))
    moving.hasher = BlockHasher(new.tenant, new._hasher, [PreviousHasher(old, 2000.0, StillClock())])
    done = moving.ask(tokens)
    assert (done.token_ids, done.cached_by_tier) == (judge(tokens), {"pool": 40})


@pytest.mark.parametrize("num_blocks", [9, 30, 40])
def test_the_longest_request_that_is_allowed_fits(make_rig: MakeRig, num_blocks: int) -> None:
    rig = make_rig(num_blocks=num_blocks, num_slots=16, max_batch_tokens=50)
    limits = EngineLimits.of(max_positions=4096, kv=rig.kv, vocab_size=61)
    num_tokens = limits.max_total_tokens
    assert num_tokens == max(num_blocks // 3, num_blocks - NUM_WINDOWED * (SEEN + 1 + AHEAD)) * TOKENS_PER_BLOCK
    for num_prompt in (num_tokens - 7, 1):
        tokens = prompt(num_prompt)
        assert rig.ask(tokens, num_tokens - num_prompt).token_ids == judge(tokens, num_tokens - num_prompt)


def test_keys_of_models_without_windows_stay_and_no_others_meet_them() -> None:
    plain, windowed = KVGroups.of(CONFIG), KVGroups.of(WINDOWED_CONFIG)
    assert kv_namespace(CONFIG, bytes(32), torch.bfloat16, groups=plain).id.hex() == "2e032d45146ae21181a63373447575d9"
    before = kv_namespace(WINDOWED_CONFIG, bytes(32), torch.bfloat16)
    assert before.id != kv_namespace(WINDOWED_CONFIG, bytes(32), torch.bfloat16, groups=windowed).id
    keys = keys_of_groups(BlockKey(bytes(48)), 2)
    assert [key[16:24].hex() for key in keys] == ["0000000000000000", "ec661e7bf2ee3b66", "ea68c47c36671ca2"]


def test_groups_of_known_geometries() -> None:
    """Gemma 3 1B, 4B and 27B, and Gemma 2 2B: layers of a block, blocks of a token, and room of a sequence alone."""
    for num_layers, full_every, expected in ((26, 6, (4, 7)), (34, 6, (5, 7)), (62, 6, (10, 7)), (26, 2, (13, 2))):
        kinds = tuple((layer + 1) % full_every != 0 for layer in range(num_layers))
        config = replace(CONFIG, num_hidden_layers=num_layers, windowed_layers=kinds, sliding_window=512)
        groups = KVGroups.of(config)
        assert (groups.num_layers, 1 + groups.num_windowed) == expected
        assert len(set(groups.places)) == num_layers
        assert all((groups.group(layer) > 0) == is_windowed for layer, is_windowed in enumerate(kinds))
    assert KVGroups.of(replace(WINDOWED_CONFIG, windowed_layers=(True, True, True))) == ONE_GROUP


class Answering:
    """A hierarchy that has some blocks, answers at the second poll, and finds so many blocks worth fetching."""

    def __init__(self, there: Mapping[BlockKey, bool], num_worth: int) -> None:
        self.there, self.num_worth, self.num_asked = there, num_worth, 0
        self._open: dict[int, tuple[Sequence[BlockKey], list[int]]] = {}

    def start_lookup(self, keys: Sequence[BlockKey], _: object) -> int:
        self.num_asked += len(keys)
        self._open[len(self._open)] = keys, []
        return len(self._open) - 1

    def poll_lookup(self, ticket: int) -> list[BlockStatus] | None:
        keys, polls = self._open[ticket]
        polls.append(1)
        found = {True: BlockStatus(Status.HIT, "host"), False: MISSING}
        return [found[self.there[key]] for key in keys] if len(polls) > 1 else None

    def plan_fetch(self, blocks: Sequence[BlockStatus], num_computed: int) -> int:
        assert len(blocks) == num_computed + NUM_WINDOWED * min(num_computed, SEEN)
        return min(self.num_worth, len(blocks))


def test_prefixes_are_those_that_a_search_of_all_finds(make_rig: MakeRig) -> None:
    """Whatever is there below, and however much of it is worth fetching. Windows are asked for as far as is of use."""
    rig, random = make_rig(tiers=False), Random(1)
    windowed = rig.cache._windowed
    for chance in (1.0, 0.98, 0.85) * 100:
        request = Request(
            request_id=1,
            tokens=prompt(49),
            sampling=Sampling(max_tokens=1),
            hasher=rig.hasher,
            on_done=lambda _: None,
            arrived_at=0.0,
        )
        request.hash_blocks(12, TOKENS_PER_BLOCK)
        there = [[random.random() < chance for _ in range(1 + NUM_WINDOWED)] for _ in range(12)]
        keys = [request.group_keys(position, NUM_WINDOWED) for position in range(12)]
        usable = [n for n in range(13) if all(of[0] for of in there[:n]) and all(map(all, there[max(0, n - SEEN) : n]))]
        by_key = dict(zip(chain(*keys), chain(*there), strict=True))
        for num_worth in (99, random.randrange(15)):
            answering = Answering(by_key, num_worth)
            planning = FetchPlanning(answering, windowed, TOKENS_PER_BLOCK)  # type: ignore[arg-type]
            request.lookup = None
            answers = (planning.num_to_fetch(request, 0, 0, 12) for _ in range(9))
            fetched = next(answer for answer in answers if answer is not None)
            assert fetched in usable
            assert fetched + NUM_WINDOWED * min(fetched, SEEN) <= num_worth
            assert fetched == max(usable) or num_worth < 99
            assert answering.num_asked <= 12 + NUM_WINDOWED * (SEEN if chance == 1.0 else SEEN + 12)
        assert planning.num_to_fetch(request, 12, 12, 12) == 0


class Heard:
    """What a listener of events believes to be on the device, by hash."""

    has_room = True

    def __init__(self) -> None:
        self.blocks: set[int] = set()

    def publish(self, batch: bytes) -> None:
        for event in msgpack.unpackb(batch)[1]:
            if event.get("medium") == "GPU":
                change = self.blocks.update if event["type"] == "BlockStored" else self.blocks.difference_update
                change(event["block_hashes"])


def test_events_tell_of_the_full_group(make_rig: MakeRig) -> None:
    rig, heard, full = make_rig(num_blocks=60, tiers=False), Heard(), set[BlockKey]()
    events = rig.cache._events = KVEvents(heard, rig.block_pool, TOKENS_PER_BLOCK, "int64")
    rig.block_pool._on_evict = lambda key, _: events.note_evicted(key)
    assert rig.hasher is not None
    for number in (1, 2, 3, 1):
        tokens = prompt(40, seed=number)
        full.update(rig.hasher.hash_blocks([*tokens, *rig.ask(tokens).token_ids][:44]))
        rig.step()
        on_device = {key for key in full if key in rig.block_pool}
        assert heard.blocks == {external_hash(key, "int64") for key in on_device}
    assert on_device < full
