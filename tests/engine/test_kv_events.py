"""KV events: what a subscriber believes is what the engine has, on the device, in host memory and on disk."""

import itertools
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import pytest

from engine_process import EngineProcess, engine_process, until
from engine_rig import TOKENS_PER_BLOCK, EngineRig, MakeRig, rigs
from events_listener import CPU, GPU, MEDIA, STORAGE, Listener, endpoint, replay_endpoint
from kvtier.config import parse_config
from kvtier.config.events import EventsConfig
from kvtier.errors import ConfigError
from kvtier.identity.keys import BlockKey
from kvtier.system.working_folder import working_folder
from kvtier_engine.events import event_form
from kvtier_engine.events.event_form import DEVICE_PLACE, DISK_PLACE, external_hash
from kvtier_engine.events.kv_events import KVEvents
from kvtier_engine.events.publisher import EventPublisher
from tiny_model import prompt

FIXTURE = Path(__file__).parents[1] / "golden" / "kv_events.hex"
"""One batch of each kind of event, byte for byte: `tests/vllm/test_own_events.py` has vLLM make the same one."""
make_rig = pytest.fixture(rigs)


@pytest.fixture
def folder() -> Iterator[Path]:
    with working_folder() as place:
        yield place


def table(folder: Path, **settings: Any) -> EventsConfig:
    return EventsConfig(endpoint=endpoint(folder), replay_endpoint=replay_endpoint(folder), **settings)


def sample() -> bytes:
    events = [
        event_form.CLEARED,
        event_form.stored([2**64 - 1, 7], None, [1, 2, 300, 70_000], 2, DEVICE_PLACE),
        event_form.stored([b"\x01" * 32], b"\x02" * 32, [5, 6], 2, DISK_PLACE),
        event_form.removed([7], DEVICE_PLACE),
        event_form.removed([b"\x01" * 32], DISK_PLACE),
    ]
    return event_form.pack_batch(events, 1764000000.25)


def test_a_batch_has_the_bytes_that_vllm_decodes() -> None:
    assert sample().hex() == FIXTURE.read_text().strip()


def test_hashes_are_the_end_of_the_chain_hash() -> None:
    key = BlockKey(bytes(range(48)))
    assert external_hash(key, "int64") == int.from_bytes(bytes(range(40, 48)), "big")
    assert external_hash(key, "bytes") == bytes(range(16, 48))


class Told:
    """A rig whose changes are published, and a listener."""

    def __init__(self, rig: EngineRig, folder: Path, **settings: Any) -> None:
        self.rig, self.publisher = rig, EventPublisher(table(folder, **settings))
        self.events = KVEvents(self.publisher, rig.block_pool, TOKENS_PER_BLOCK, "int64", hierarchy=rig.hierarchy)
        rig.cache._events = self.events
        before = rig.block_pool._on_evict

        def on_evict(key: BlockKey, block_id: int) -> None:
            if before is not None:
                before(key, block_id)
            self.events.note_evicted(key)

        rig.block_pool._on_evict = on_evict
        self.listener = Listener(folder)

    def agree(self) -> Listener:
        """The listener, when it has heard everything, which is compared with what the rig has."""
        self.rig.step()  # tells what the last step and its copies have changed
        truth = {
            GPU: set(map(self._hash, self.rig.block_pool._by_key)),
            CPU: set(map(self._hash, self._in_host())),
        }
        until(lambda: {medium: set(self.listener.catch_up().blocks[medium]) for medium in truth} == truth)
        return self.listener

    def _in_host(self) -> list[BlockKey]:
        hierarchy = self.rig.hierarchy
        entries = () if hierarchy is None else hierarchy._directory._index.slots._held.values()
        return [entry.key for entry in entries if hierarchy is not None and hierarchy.has("host", entry.key)]

    def _hash(self, key: BlockKey) -> int | bytes:
        return external_hash(key, "int64")

    def close(self) -> None:
        self.listener.close()
        self.publisher.close()


def test_a_listener_knows_what_is_on_the_device_and_in_host_memory(make_rig: MakeRig, folder: Path) -> None:
    rig = make_rig(num_blocks=24, num_slots=30, cache_aware=True)
    chance = Random(1)
    with closing(Told(rig, folder)) as told:
        prompts = [prompt(chance.randint(5, 50), seed=seed) for seed in range(8)]
        prompts += [[*each[:9], *prompt(12, seed=100 + number)] for number, each in enumerate(prompts[:4])]
        for number, each in enumerate(prompts):
            rig.ask(each)
            if number % 3 == 2:
                told.agree()
        assert all(told.listener.num_removed[medium] for medium in (GPU, CPU))
        assert told.listener.num_cleared == 1, "at first, what an earlier process may have told"
        rig.scheduler.reset_cache()
        assert told.agree().blocks == {medium: {} for medium in MEDIA}
        assert told.listener.num_cleared == 2
        rig.ask(prompts[0])
        listener = told.agree()
        assert set(listener.leading(prompts[0], TOKENS_PER_BLOCK)) == {GPU}
        for blocks in listener.blocks.values():
            for parent, _ in blocks.values():
                assert parent is None or parent in blocks
        assert listener.gaps == []


def test_listeners_begin_anew_when_too_much_has_waited(
    make_rig: MakeRig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The publishing thread hangs. No step waits for it, and what waits is bounded."""
    hangs, goes_on, send = threading.Event(), threading.Event(), EventPublisher._send

    def held(self: EventPublisher, *message: bytes) -> None:
        hangs.set()
        goes_on.wait()
        send(self, *message)

    monkeypatch.setattr(EventPublisher, "_send", held)
    rig = make_rig(num_blocks=24, tiers=False)
    with closing(Told(rig, folder, queue_batches=2)) as told:
        rig.step()
        assert hangs.wait(20), "the thread takes the first batch; from here on there is less and less room"
        for seed in itertools.count():
            rig.ask(prompt(30, seed=seed))
            if not told.publisher.has_room:
                break
        rig.ask(prompt(40, seed=1000))
        assert not told.events._waiting
        assert not told.events._changes
        goes_on.set()
        until(lambda: told.publisher.has_room)
        listener = told.agree()
        assert listener.num_cleared == 2
        assert listener.gaps == []


def test_only_the_newest_batches_are_kept(folder: Path) -> None:
    with closing(EventPublisher(table(folder, replay_bytes=1000))) as publisher, closing(Listener(folder)) as listener:
        for number in range(50):
            publisher.publish(event_form.pack_batch([event_form.CLEARED], float(number)))
        until(lambda: listener.catch_up().next_number == 50)
        late = Listener(folder)
        late.catch_up()
        assert 0 < late.num_cleared < 50
        assert late.gaps == list(range(50 - late.num_cleared))
        assert late.num_cleared * len(event_form.pack_batch([event_form.CLEARED], 0.0)) <= 1000
        late._replay.send_multipart([b"", b"no number"])
        late._replay.send_multipart([b"not empty", bytes(8), b""])
        assert late.catch_up().next_number == 50, "who asks wrongly hears nothing, and disturbs nobody"
        late.close()


def test_endpoints_that_cannot_be_had_are_named(folder: Path) -> None:
    with (
        closing(EventPublisher(table(folder))),
        pytest.raises(ConfigError, match=r"events\.endpoint: somebody listens"),
    ):
        EventPublisher(table(folder))
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="cannot listen on tcp"):
        EventPublisher(EventsConfig(endpoint=f"tcp://127.0.0.1:{taken.getsockname()[1]}"))


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ({"endpoint": "127.0.0.1:5557"}, "use tcp://HOST:PORT"),
        ({"endpoint": "tcp://*:5557"}, "in the clear"),
        ({"endpoint": "ipc:///x", "replay_endpoint": "tcp://10.0.0.1:5557"}, "replay_endpoint tcp://10.0.0.1:5557"),
        ({"replay_endpoint": "tcp://127.0.0.1:5557"}, "set endpoint, too"),
    ],
)
def test_settings_that_make_no_sense_are_refused(events: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({"events": events}, source="test", environ={})
    parse_config({"events": {"endpoint": "tcp://*:5557", "insecure": True}}, source="test", environ={})


SMALL = {
    "KVTIER__ENGINE__NUM_THREADS": "1",
    "KVTIER__ENGINE__KV_BYTES": "18MiB",
    "KVTIER__HOST__CAPACITY_BYTES": "20MiB",
    "KVTIER__DISK__CAPACITY_BYTES": "256MiB",
    "KVTIER__CACHE__FETCH": "always",
    "KVTIER__CACHE__LOAD_DEADLINE_S": "60",
    "KVTIER__CACHE__LOOKUP_DEADLINE_S": "60",
}
"""Blocks of 720 KiB: 25 on the device, 28 in host memory."""
NAMES = {GPU: "device", CPU: "host", STORAGE: "disk"}


def cached_by_tier(engine: EngineProcess, tokens: list[int]) -> dict[str, int]:
    answer = engine.complete(prompt=tokens, max_tokens=1)
    found: dict[str, int] = answer["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]
    return {tier: count for tier, count in found.items() if count}


def test_a_listener_predicts_where_a_real_engine_finds_its_prompts(folder: Path) -> None:
    """Evictions from the device and from host memory, spills to disk, and a reset; the listener joins late."""
    chance = Random(3)
    prompts = [[chance.randrange(1000, 40_000) for _ in range(70)] for _ in range(9)]
    environ = SMALL | {
        "KVTIER__EVENTS__ENDPOINT": endpoint(folder),
        "KVTIER__EVENTS__REPLAY_ENDPOINT": replay_endpoint(folder),
        "KVTIER__DISK__DIRECTORY": str(folder / "blocks"),
    }
    with engine_process(folder, **environ) as engine:
        for each in prompts[:-1]:
            assert cached_by_tier(engine, each) == {}
        with closing(Listener(folder)) as listener:

            def settle() -> None:
                """Until the numbers of blocks are those of the engine's metrics, on disk all that was computed."""
                until(
                    lambda: (
                        all(
                            len(listener.catch_up().blocks[medium])
                            == engine.metric(f'kvtier_tier_held_blocks{{tier="{NAMES[medium]}"}}')
                            for medium in (CPU, STORAGE)
                        )
                        and engine.metric("kvtier_engine_running") == 0
                    )
                )

            until(lambda: len(listener.catch_up().blocks[STORAGE]) == 32)
            settle()
            assert all(listener.num_removed[medium] for medium in (GPU, CPU))
            seen = set()
            for each in (*reversed(prompts[:-1]), *prompts[:3]):
                where = listener.leading(each, 16)
                expected = {NAMES[medium]: 16 * where.count(medium) for medium in MEDIA if medium in where}
                assert cached_by_tier(engine, each) == expected
                seen |= set(expected)
                settle()
            assert seen == {"device", "host", "disk"}
            assert engine.post("/v1/cache/reset", {})
            until(lambda: listener.catch_up().blocks == {medium: {} for medium in MEDIA})
            assert cached_by_tier(engine, prompts[-1]) == {}
            until(lambda: len(listener.hear().blocks[STORAGE]) == 4)
            assert listener.num_cleared == 2
            assert listener.gaps == []
