"""KV events of a real publisher: late, in order, with gaps, and of an engine that was restarted."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from kvtier.config.events import EventsConfig
from kvtier_engine.events.event_form import DEVICE_PLACE, DISK_PLACE, pack_batch, removed, stored
from kvtier_engine.events.publisher import EventPublisher
from kvtier_gateway.events.block_names import OwnNames
from kvtier_gateway.events.subscription import Subscription
from kvtier_gateway.routing.values import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent, Medium

PATIENCE_S = 60.0


class Engine:
    """Publishes one block a batch."""

    def __init__(self, folder: Path, replay_bytes: int = 1 << 20) -> None:
        self.endpoint, self.replay = f"ipc://{folder}/events", f"ipc://{folder}/replay"
        self._config = EventsConfig.model_validate(
            {"endpoint": self.endpoint, "replay_endpoint": self.replay, "replay_bytes": replay_bytes}
        )

    @contextlib.contextmanager
    def running(self) -> Iterator[EventPublisher]:
        publisher = EventPublisher(self._config)
        try:
            yield publisher
        finally:
            publisher.close()


def batch(key: int) -> bytes:
    return pack_batch([stored([key], None, [1] * 16, 16, DEVICE_PLACE), removed([7], DISK_PLACE)], 0.0)


class Heard:
    """What a subscription has told, with waiting for more."""

    def __init__(self) -> None:
        self.events: list[KvEvent] = []
        self._more = asyncio.Event()

    def take(self, event: KvEvent) -> None:
        self.events.append(event)
        self._more.set()

    async def until(self, *expected: KvEvent) -> None:
        """Waits until these are the last ones."""
        async with asyncio.timeout(PATIENCE_S):
            while self.events[-len(expected) :] != list(expected):
                self._more.clear()
                await self._more.wait()


@contextlib.asynccontextmanager
async def listening(engine: Engine, heard: Heard, *, replays: bool = True) -> AsyncIterator[Subscription]:
    context = zmq.asyncio.Context()
    subscription = Subscription(context, engine.endpoint, engine.replay if replays else None, OwnNames(), heard.take)
    task = asyncio.create_task(subscription.run())
    try:
        yield subscription
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        context.destroy(linger=0)


def block(key: int) -> BlocksStored:
    return BlocksStored([key], Medium.DEVICE)


def test_who_comes_late_hears_all_and_a_restart_begins_anew(tmp_path: Path) -> None:
    async def run() -> None:
        engine, heard = Engine(tmp_path), Heard()
        with engine.running() as publisher:
            for key in range(5):
                publisher.publish(batch(key))
            async with listening(engine, heard) as subscription:
                await heard.until(*map(block, range(5)))
                publisher.publish(pack_batch([removed([3], DEVICE_PLACE)], 0.0))
                await heard.until(block(4), BlocksRemoved([3], Medium.DEVICE))
                publisher.close()
                with engine.running() as restarted:
                    restarted.publish(batch(100))
                    while BlocksCleared() not in heard.events:  # until ZeroMQ has connected again
                        restarted.publish(batch(101))
                        await asyncio.sleep(0.02)
                    at = heard.events.index(BlocksCleared())
                    restarted.publish(batch(102))
                    await heard.until(block(102))
                    assert block(100) in heard.events[at:]
                    assert block(4) not in heard.events[at:]
                assert subscription.num_gaps == 0

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


@pytest.mark.parametrize("replays", [True, False])
def test_a_gap_is_closed_or_makes_it_forget(tmp_path: Path, replays: bool) -> None:
    async def run() -> None:
        engine, heard = Engine(tmp_path), Heard()
        with engine.running() as publisher:
            async with listening(engine, heard, replays=replays) as subscription:
                key = 0
                while not heard.events:
                    publisher.publish(batch(key))
                    key += 1
                    await asyncio.sleep(0.02)
                await heard.until(block(key - 1))
                # As if the next two had been dropped on their way.
                for missed in (key, key + 1):
                    publisher.publish(batch(missed))
                await heard.until(block(key + 1))
                await subscription._take(key + 4, batch(key + 4))
                assert heard.events[-2:] == [BlocksCleared(), block(key + 4)]
                assert subscription.num_gaps == 1
                await subscription._take(key + 5, b"\xc1 no batch")
                assert heard.events[-1] == BlocksCleared()

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))
