"""KV events under vLLM's own scheduler: with every batch, a router believes of our tiers what the index says."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from kv_events_rig import CPU, STORAGE, Place, Router
from stepping_rank import BLOCK
from stepping_rig import Engine
from vllm.distributed.kv_events import EventBatch, EventPublisher, KVEventBatch
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

import kvtier_vllm.observe.kv_events

Start = Callable[..., Engine]
MODES = pytest.mark.parametrize("mode", [{}, {"async_scheduling": True}], ids=["plain", "asynchronous"])
TIERS = {CPU: "host", STORAGE: "disk"}


class Wire(EventPublisher):
    """Brings batches to a router as they look on the wire. Compares it with the index, then and after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.engine: Engine | None = None
        self.whole = set(TIERS)
        """Media of which the router should know everything."""

    def attach(self, engine: Engine) -> None:
        self.engine = engine
        update = engine.scheduler.update_from_output

        def update_and_compare(*what: Any) -> Any:
            outputs = update(*what)
            self.compare()
            return outputs

        engine.scheduler.update_from_output = update_and_compare

    def publish(self, events: EventBatch) -> None:
        self.router.hear(msgspec.msgpack.decode(msgspec.msgpack.encode(events), type=KVEventBatch).events)
        self.compare()

    def shutdown(self) -> None:
        pass

    def compare(self) -> None:
        for medium, tier in TIERS.items():
            told, there = self.router.places(medium), self._places(tier)
            assert told <= there
            assert told == there or medium not in self.whole

    def _places(self, tier: str) -> set[Place]:
        """The blocks that requests have named and that the tier holds."""
        assert self.engine is not None
        directory = self.engine.connector._scheduler._work.cache.directory  # type: ignore[attr-defined]
        if tier not in directory.watch().tiers:
            return set()
        return {
            Place(0, maybe_convert_block_hash(block_hash))
            for request_id, request in self.engine.requests.items()
            for key, block_hash in zip(
                self.engine.hashes(request_id, request.num_tokens), request.block_hashes, strict=True
            )
            if directory.has(tier, key)
        }


@pytest.fixture
def listen(start: Start) -> Callable[..., tuple[Engine, Wire]]:
    """Starts an engine that somebody listens to."""

    def listen(**how: object) -> tuple[Engine, Wire]:
        wire = Wire()
        engine = start(publisher=wire, **how)
        wire.attach(engine)
        return engine, wire

    return listen


Listen = Callable[..., tuple[Engine, Wire]]


def expect_hits(engine: Engine, wire: Wire, number: int, num_tokens: int) -> None:
    """The engine hits what the router thinks it does, or more from a disk of which it does not know everything."""
    engine.forget_device()
    request_id = engine.ask(number, num_tokens)
    believed = wire.router.num_hits(engine.requests[request_id].prompt_token_ids, CPU, STORAGE)
    is_exact = STORAGE in wire.whole
    if wire.router.places(
        STORAGE
    ):  # with the reset just now, it is told again of what somebody remembers the tokens of
        wire.whole.discard(STORAGE)
    engine.finish()
    hits, believed = engine.spared[request_id] // BLOCK, min(believed, (num_tokens - 1) // BLOCK)
    assert hits == believed or (hits > believed and not is_exact)


@MODES
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("disk", [False, True], ids=["memory", "disk"])
def test_a_router_knows_what_is_there(
    listen: Listen, mode: dict[str, bool], ranks: int, disk: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preemptions, evictions, answers that go on, prefixes that requests have in common, resets of vLLM's own cache."""
    monkeypatch.setattr(kvtier_vllm.observe.kv_events, "_SWEEP_AT", 0)
    engine, wire = listen(disk=disk, num_blocks=20, num_host_blocks=24, num_ranks=ranks, **mode)
    for turn in range(3):
        asked = [
            engine.ask(number, 5 * BLOCK, common=2 * BLOCK if number > 3 else 0, max_tokens=40)
            for number in [*range(1, 7), *range(10 * turn + 10, 10 * turn + 16)]
        ]
        engine.finish()
        assert wire.router.places(CPU)
        for number in (1, 2):
            expect_hits(engine, wire, number, 5 * BLOCK)
        engine.forget_device()
        engine.continue_with(asked[0], max_tokens=20)
        engine.finish()
    assert engine.num_preemptions > 0
    events = engine.connector._scheduler._events  # type: ignore[attr-defined]
    assert events._here.keys() == events._told["host"].keys()
    assert len(events._coming) <= 20 + 24, "what is remembered is bounded by what there is room for"
    counts = wire.router.counts
    assert counts[CPU, "removed"] > 24
    assert counts[STORAGE, "stored"] > 0 or not disk
    engine.require_right_answers()
    for medium in TIERS:
        wire.router.compare_with_device(medium)


@MODES
def test_a_reset_is_told_at_once_and_what_it_finds_on_the_way_never(listen: Listen, mode: dict[str, bool]) -> None:
    engine, wire = listen(disk=True, **mode)
    engine.ask(1, 100)
    engine.finish()
    engine.forget_device()
    disk = engine.ranks[0].hold_disk()
    engine.ask(1, 100)
    engine.step()
    disk.gate.clear()
    engine.ask(2, 100)
    engine.until(disk.entered.is_set, "a block is on its way to disk")
    assert wire.router.places(CPU)
    assert engine.connector.reset_cache() is not False
    assert engine.connector.has_pending_push_work()
    engine.step()
    assert not wire.router.places(STORAGE)
    disk.gate.set()
    engine.finish()
    engine.require_right_answers()
    assert engine.connector.reset_cache() is not False
    assert engine.connector.has_pending_push_work(), "also an idle engine says so"
    engine.finish()
    assert wire.router.places(CPU) == wire.router.places(STORAGE) == set()
    expect_hits(engine, wire, 1, 100)


def test_a_reset_without_disk_is_told_by_an_idle_engine(listen: Listen) -> None:
    engine, wire = listen()
    engine.ask(1, 100)
    engine.finish()
    assert len(wire.router.places(CPU)) == 6
    engine.connector.reset_cache()
    assert engine.connector.has_pending_push_work()
    engine.finish()
    assert not wire.router.places(CPU)


def test_who_forgets_all_with_the_device_is_told_again(listen: Listen) -> None:
    """vLLM's event of a reset of its own cache does not say that it means the device."""
    engine, wire = listen(disk=True)
    engine.ask(1, 100)
    engine.finish()
    engine.until(lambda: len(wire.router.places(STORAGE)) == 6, "they are on disk")
    engine.forget_device()
    engine.ask(2, 7)
    engine.finish()
    assert len(wire.router.places(CPU)) == len(wire.router.places(STORAGE)) == 6
    assert wire.router.counts[CPU, "removed"] == 6, "also to those who count"
    expect_hits(engine, wire, 1, 100)


@MODES
def test_loads_that_fail_or_are_given_up(listen: Listen, mode: dict[str, bool]) -> None:
    engine, wire = listen(disk=True, num_host_blocks=16, **mode)
    for number in (1, 2, 3):
        engine.ask(number, 100)
        engine.finish()
    engine.forget_device()
    disk = engine.ranks[0].hold_disk()
    disk.broken = {engine.hashes("1-0")[3]}
    failing = engine.ask(1, 100)
    engine.finish()
    assert engine.received[failing] == 1
    engine.forget_device()
    disk.gate.clear()
    aborted = engine.ask(2, 100)
    engine.until(lambda: engine.is_loading(aborted), "the load is under way")
    engine.step()
    engine.abort(aborted)
    engine.step()
    disk.gate.set()
    engine.finish()
    engine.require_right_answers()
    for medium in TIERS:
        wire.router.compare_with_device(medium)


def test_what_an_earlier_process_has_left_on_disk_is_told_of_when_it_is_asked_for(start: Start, listen: Listen) -> None:
    earlier = start(disk=True)
    earlier.ask(1, 100)
    earlier.finish()
    earlier.close()
    engine, wire = listen(disk=True)
    wire.whole = {CPU}
    engine.ask(2, 7)
    engine.finish()
    assert not wire.router.places(STORAGE), "nobody can say which tokens these are"
    again = engine.ask(1, 100)
    engine.finish()
    assert engine.spared[again] == 6 * BLOCK
    assert len(wire.router.places(STORAGE)) == len(wire.router.places(CPU)) == 6
    for medium in TIERS:
        wire.router.compare_with_device(medium)


def test_without_listeners_nothing_is_noted(start: Start) -> None:
    engine = start()
    engine.ask(1, 100)
    engine.finish()
    assert engine.connector.take_events() == []
    work = engine.connector._scheduler._work  # type: ignore[attr-defined]
    assert work.cache.directory._index.content_changes is None
