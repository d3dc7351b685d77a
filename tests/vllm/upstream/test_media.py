"""Requests with media under vLLM's own scheduler: their content is known before anything is looked up or saved."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from kv_events_rig import CPU, GPU, Router
from stepping_rank import BLOCK
from stepping_rig import Engine
from vllm.distributed.kv_events import EventBatch, EventPublisher
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)

import kvtier_vllm.content.media
from cache_pool import WAIT_S

Start = Callable[..., Engine]
NUM_TOKENS = 100
NUM_HIT = (NUM_TOKENS - 1) // BLOCK * BLOCK
FIRST = 2 * BLOCK - 3
"""Where images begin: with the last tokens of a block."""


class Listener(EventPublisher):
    def __init__(self) -> None:
        super().__init__()
        self.router = Router()

    def publish(self, events: EventBatch) -> None:
        self.router.hear(events.events)

    def shutdown(self) -> None:
        pass


class Gate:
    """Holds up whoever hashes media."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self._hash = kvtier_vllm.content.media._content

    def hash(self, item: MultiModalKwargsItem) -> bytes | str:
        assert self.open.wait(20.0)
        return self._hash(item)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """For media of any size."""
    gate = Gate()
    monkeypatch.setattr(kvtier_vllm.content.media, "_content", gate.hash)
    monkeypatch.setattr(kvtier_vllm.content.media, "_AT_ONCE_BYTES", 0)
    yield gate
    gate.open.set()


def image(color: int, *, name: str = "a name", offset: int = FIRST, length: int = 20) -> MultiModalFeatureSpec:
    pixels = MultiModalFieldElem(torch.full((30, 4), color, dtype=torch.uint8), MultiModalBatchedField())
    item = MultiModalKwargsItem({"pixel_values": pixels})
    position = PlaceholderRange(offset, length)
    return MultiModalFeatureSpec(data=item, modality="image", identifier=name, mm_position=position)


def spared(engine: Engine, *media: MultiModalFeatureSpec, **how: object) -> int:
    """Tokens that the next request for the same prompt need not compute, wherever they come from."""
    request_id = engine.ask(1, NUM_TOKENS, media=media, **how)  # type: ignore[arg-type]
    engine.finish()
    engine.require_right_answers()
    return engine.spared[request_id]


def is_waiting(engine: Engine, request_id: str) -> bool:
    return request_id in engine.connector._scheduler._admission._media  # type: ignore[attr-defined]


def lose_patience(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, requests that wait for media have waited for too long."""
    waiting = engine.connector._scheduler._admission._media  # type: ignore[attr-defined]
    monkeypatch.setattr(waiting, "_clock", lambda: time.monotonic() + 2 * WAIT_S)


@pytest.mark.parametrize("where", ["device", "host"])
def test_media_meet_by_content_alone(start: Start, where: str) -> None:
    engine = start()
    assert spared(engine, image(1)) == 0
    for media, wanted in (
        ([image(1, name="another")], NUM_HIT),
        ([image(2)], BLOCK),
        ([image(1, offset=FIRST + 1)], BLOCK),
        ([image(1, offset=FIRST + BLOCK)], BLOCK),
        ([image(1, length=21)], BLOCK),
        ([replace(image(1), modality="video")], BLOCK),
        ([image(1), image(2, offset=60)], 48),
        ([image(2), image(1, offset=60)], 48),
        ([], 48),
    ):
        if where == "host":
            engine.forget_device()
        assert spared(engine, *media) <= wanted, media
    if where == "host":
        engine.forget_device()
    assert spared(engine, image(1, name="again")) == NUM_HIT


def test_tenants_do_not_have_the_same_names(start: Start) -> None:
    engine = start(gateway=["blue"])
    asked = [engine.ask(1, NUM_TOKENS, media=[image(1)], params={"tenant": name}) for name in ("red", "red", "blue")]
    engine.finish()
    names = [engine.requests[each].mm_features[0].identifier for each in asked]
    assert names[0] == names[1] != names[2]
    assert "a name" not in names


def test_a_request_waits_for_its_media_and_others_do_not(start: Start, gate: Gate) -> None:
    engine = start()
    gate.open.set()
    spared(engine, image(1))
    engine.forget_device()
    gate.open.clear()
    waiting, other = engine.ask(1, NUM_TOKENS, media=[image(1)]), engine.ask(2, NUM_TOKENS)
    engine.until(lambda: engine.requests[other].is_finished(), "the other one has its answer")
    assert is_waiting(engine, waiting)
    assert waiting not in engine.spared
    gate.open.set()
    engine.finish()
    assert engine.spared[waiting] == NUM_HIT
    engine.require_right_answers()


def test_media_that_take_too_long_are_computed_and_not_kept(
    start: Start, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start()
    slow = engine.ask(1, NUM_TOKENS, media=[image(1)])
    engine.step()
    assert is_waiting(engine, slow)
    lose_patience(engine, monkeypatch)
    engine.finish()
    assert engine.requests[slow].mm_features[0].identifier == "a name"
    gate.open.set()
    engine.forget_device()
    assert spared(engine, image(1)) == 0
    engine.forget_device()
    assert spared(engine, image(1)) == NUM_HIT


def test_what_was_found_by_a_clients_name_is_not_kept_as_what_it_is(
    start: Start, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that vLLM's own cache has of another image by the same name, when the content is told in between."""
    engine = start()
    other = engine.ask(1, NUM_TOKENS, media=[image(2)])
    engine.step()
    with monkeypatch.context() as late:
        lose_patience(engine, late)
        engine.finish()
    assert engine.requests[other].mm_features[0].identifier == "a name"
    asked = engine.ask(1, NUM_TOKENS, media=[image(1)])
    engine.step()
    assert is_waiting(engine, asked)
    gate.open.set()
    engine.finish()
    assert engine.spared[asked] <= BLOCK


def test_who_reads_no_cache_does_not_wait_and_is_not_kept(start: Start, gate: Gate) -> None:
    engine = start()
    hasty = engine.ask(1, NUM_TOKENS, media=[image(1)])
    engine.requests[hasty].skip_reading_prefix_cache = True
    engine.step()
    assert engine.spared[hasty] == 0
    gate.open.set()
    engine.finish()
    engine.forget_device()
    assert spared(engine, image(1)) == 0


def test_who_ends_while_it_waits_leaves_nothing(start: Start, gate: Gate) -> None:
    engine = start()
    gone = engine.ask(1, NUM_TOKENS, media=[image(1)])
    engine.step()
    engine.abort(gone)
    assert not is_waiting(engine, gone)
    gate.open.set()
    engine.finish()
    engine.require_right_answers()


def test_nothing_is_kept_of_media_without_content(start: Start) -> None:
    engine = start()
    for _ in range(2):
        assert spared(engine, replace(image(1), data=None)) == 0
        engine.forget_device()
    assert spared(engine, image(1)) == 0, "by the same name"


def test_a_crowd_on_a_small_device(start: Start) -> None:
    engine = start(num_blocks=20)
    for turn in range(3):
        for color in range(8):
            engine.ask(color + 1, 5 * BLOCK, max_tokens=40, media=[image(color, name=str(turn))])
        engine.finish()
    assert engine.num_preemptions
    engine.require_right_answers()


def test_events_say_of_media_what_those_of_the_device_say(start: Start) -> None:
    listener = Listener()
    engine = start(publisher=listener)
    asked = engine.ask(1, NUM_TOKENS, media=[image(1), image(2, offset=60)])
    engine.finish()
    names = [feature.identifier for feature in engine.requests[asked].mm_features]
    listener.router.compare_with_device(CPU)
    told = {key for block in listener.router.known[CPU].values() for key in block.extra or ()}
    assert told == {key for block in listener.router.known[GPU].values() for key in block.extra or ()}
    assert {name for name, _ in told} == set(names)
