"""How the gateway asks a real pool which blocks of a prompt it has: on its event loop, and in threads."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import uvloop
from prometheus_client import CollectorRegistry

from kvtier.config import parse_config
from kvtier.identity.keys import BlockHasher, BlockKey, NamespaceId, PrefixHasher, StoreKey, rank_keys, tenant_id
from kvtier.memory.pieces import Payload, Target
from kvtier.net.certificates import TlsFiles
from kvtier.net.tls import ClientTls
from kvtier.testing.blocks import summed
from kvtier.testing.faulty_link import FaultyLink, LinkFault
from kvtier.tiers.base import Status, TierOf
from kvtier.tiers.pool.access import PoolAccess, plain_calls
from kvtier_gateway.keying.pool import PoolLookup
from kvtier_gateway.metrics import GatewayMetrics
from pool_rig import TOKENS, WAIT_S, connect, pool_process
from suspending import suspend, suspended

uvloop.run(asyncio.sleep(0))
"""The first loop of uvloop's in a process leaves a pipe open."""
RANKS = [NamespaceId(bytes([number]) * 16) for number in (1, 2)]
NUM_THERE = {"red": (300, 40), "blue": (7, 7)}
"""How many leading blocks the pool has of each tenant's prompt, by rank."""
NUM_KEYS = 320


def block_keys(tenant: str) -> list[BlockKey]:
    hasher = BlockHasher(tenant_id(tenant), PrefixHasher(4 * b"secret" + tenant.encode(), "", 16))
    return hasher.hash_blocks(np.arange(16 * NUM_KEYS, dtype=np.int32))


KEYS = {tenant: block_keys(tenant) for tenant in NUM_THERE}


def fill(address: str) -> None:
    for tenant, numbers in NUM_THERE.items():
        with contextlib.closing(connect(address, tenant)) as tier:
            for rank, number in zip(RANKS, numbers, strict=True):
                keys: Sequence[StoreKey] = rank_keys(KEYS[tenant][:number], rank)
                tier.write([summed(key, bytes(64)) for key in keys])


class Lookups:
    """A `PoolLookup`, and how many of its lookups went through threads."""

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        timeout_s: float = WAIT_S,
        call_timeout_s: float = WAIT_S,
        environ: Mapping[str, str] = TOKENS,
        **pool: float,
    ) -> None:
        tenants = {name: {"token": f"env:{name}"} for name in TOKENS}
        calls = {"call_timeout_s": call_timeout_s, "breaker_failures": 2, "breaker_open_s": 0.2}
        tables = {"tenants": tenants, "pool": {"address": address, **calls, **pool}}
        config = parse_config(tables, source="test", folder=Path(), environ=environ)
        self.registry = CollectorRegistry()
        self.lookup = PoolLookup(config, GatewayMetrics(self.registry), timeout_s)
        self.num_in_threads = 0
        ask = self.lookup._ask

        def counted(tenant: str, keys: Sequence[BlockKey], namespaces: Sequence[NamespaceId]) -> int | None:
            self.num_in_threads += 1
            return ask(tenant, keys, namespaces)

        self.lookup._ask = counted  # type: ignore[method-assign] # counts, and does the same

    async def ask(self, tenant: str = "red", num_keys: int = 20, ranks: Sequence[NamespaceId] = RANKS) -> int | None:
        return await self.lookup.num_leading(tenant, KEYS[tenant][:num_keys], ranks)

    async def until_on_loop(self, tenant: str = "red") -> None:
        """Asks until a right answer has come through no thread."""
        async with asyncio.timeout(WAIT_S):
            while True:
                before = self.num_in_threads
                found = await self.ask(tenant, 5)
                if found == 5 and self.num_in_threads == before:
                    return
                await asyncio.sleep(0.01)

    def num_looked_up(self) -> float:
        """Blocks, as metrics count them."""
        values = (
            self.registry.get_sample_value(
                "kvtier_tier_blocks_total", {"tier": "pool", "op": "lookup", "status": status}
            )
            for status in ("hit", "miss")
        )
        return sum(value or 0.0 for value in values)


class ComesBack:
    """A tier that is left alone until a lookup has been answered without it."""

    def __init__(self) -> None:
        self.is_left_alone = True

    def lookup(self, keys: Sequence[StoreKey]) -> list[Status]:
        self.is_left_alone = False
        return [Status.MISS] * len(keys)


def run(body: Callable[[], Coroutine[None, None, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(3 * WAIT_S):
            await body()

    uvloop.run(bounded())  # as the gateway does


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.tiers.pool.pause.PAUSE_S", 0.2)


@contextlib.asynccontextmanager
async def heartbeat() -> AsyncIterator[list[int]]:
    """Counts how often the event loop came round in steps of 10 ms."""
    beats = [0]

    async def beat() -> None:
        while True:
            await asyncio.sleep(0.01)
            beats[0] += 1

    task = asyncio.create_task(beat())
    try:
        yield beats
    finally:
        task.cancel()


@pytest.mark.parametrize("way", ["unix", "tcp"])
def test_few_keys_are_asked_for_by_the_loop_and_many_in_threads(tmp_path: Path, way: str) -> None:
    path = f"unix:{tmp_path / 'pool.sock'}"
    with pool_process(f"--listen={path}") as pool:
        fill(pool.block)
        lookups = Lookups(path if way == "unix" else pool.block.partition(",")[0])

        async def body() -> None:
            assert await lookups.ask() == 20
            assert lookups.num_in_threads == 1, "nothing is connected before the first lookup"
            await lookups.until_on_loop("red")
            await lookups.until_on_loop("blue")
            before, blocks_before = lookups.num_in_threads, lookups.num_looked_up()
            asked = [("red", 20), ("blue", 20), ("red", 100), ("blue", 7), ("red", 1)]
            assert await asyncio.gather(*(lookups.ask(*each) for each in asked)) == [20, 7, 40, 7, 1]
            assert lookups.num_in_threads == before
            # For the second rank, only what the first one has is asked for.
            assert lookups.num_looked_up() - blocks_before == 2 * 20 + (20 + 7) + 2 * 100 + 2 * 7 + 2
            assert await lookups.ask("red", 0) is None
            assert await asyncio.gather(*(lookups.ask("red", NUM_KEYS, RANKS[:1]) for _ in range(20))) == [300] * 20
            assert lookups.num_in_threads > before, "more than 1,024 keys were under way"
            assert await asyncio.gather(*(lookups.ask("red", 1, RANKS[:1]) for _ in range(150))) == [1] * 150
            blocks_before = lookups.num_looked_up()
            assert await asyncio.gather(*(lookups.ask("red", 300) for _ in range(6))) == [40] * 6
            assert lookups.num_looked_up() - blocks_before == 6 * 600, "each block is asked for once in each rank"

        run(body)
        lookups.lookup.close()


def test_an_answer_that_nobody_waits_for_any_longer_is_passed_over() -> None:
    with pool_process() as pool:
        fill(pool.block)
        lookups = Lookups(pool.block)

        async def body() -> None:
            await lookups.until_on_loop()
            before = lookups.num_in_threads
            given_up = asyncio.create_task(lookups.ask("red", 20))
            await asyncio.sleep(0)  # it is sent
            given_up.cancel()
            assert await lookups.ask("red", 9) == 9
            assert lookups.num_in_threads == before

        run(body)
        lookups.lookup.close()


def test_a_pool_that_dies_and_comes_back() -> None:
    with pool_process() as pool:
        fill(pool.block)
        lookups = Lookups(pool.block)

        async def body() -> None:
            await lookups.until_on_loop()
            suspend(pool.process.pid)
            asked = [asyncio.create_task(lookups.ask()) for _ in range(3)]
            await asyncio.sleep(0)  # they are sent
            pool.kill()
            assert set(await asyncio.gather(*asked)) <= {None, 0}  # 0 until the breaker opens
            assert await lookups.ask() is None
            again = pool.again()
            try:
                fill(again.block)
                await lookups.until_on_loop()
            finally:
                again.kill()

        run(body)
        lookups.lookup.close()


def test_a_pool_that_comes_back_during_a_lookup_that_it_was_not_asked_is_not_empty() -> None:
    with pool_process() as pool:
        lookups = Lookups(pool.block)
        shared = lookups.lookup._shared
        assert shared is not None
        pool_tier = ComesBack()
        lookups.lookup._shared = replace(
            shared, tier=cast(TierOf[Payload, Target], pool_tier), is_left_alone=lambda tenant: pool_tier.is_left_alone
        )
        assert lookups.lookup._ask("red", KEYS["red"][:5], RANKS) is None
        lookups.lookup.close()


def test_a_pool_that_hangs_holds_up_nobody() -> None:
    with pool_process() as pool:
        fill(pool.block)
        lookups = Lookups(pool.block, timeout_s=0.2, call_timeout_s=0.5)

        async def body() -> None:
            await lookups.until_on_loop()
            with suspended(pool.process.pid):
                async with heartbeat() as beats:
                    for _ in range(4):
                        assert set(await asyncio.gather(*(lookups.ask() for _ in range(100)))) == {None}
                    assert beats[0] >= 20, "the loop has stood still"
            await lookups.until_on_loop()

        run(body)
        lookups.lookup.close()


@pytest.mark.parametrize("fault", [LinkFault.GARBAGE, LinkFault.RESET, LinkFault.BLACK_HOLE])
def test_a_network_that_fails_costs_answers_and_heals(fault: LinkFault) -> None:
    with pool_process() as pool:
        fill(pool.block)
        host, _, port = pool.block.rpartition(":")
        link = FaultyLink((host, int(port)), seed=5)
        with link.running() as address:
            lookups = Lookups(address, timeout_s=0.5, call_timeout_s=0.5)

            async def body() -> None:
                await lookups.until_on_loop()
                link.fail(fault)
                async with heartbeat() as beats:
                    for _ in range(3):
                        await asyncio.gather(*(lookups.ask() for _ in range(20)))
                        await asyncio.sleep(0.1)
                    assert beats[0] >= 10, "the loop has stood still"
                link.heal()
                await lookups.until_on_loop()

            run(body)
            lookups.lookup.close()


@contextlib.contextmanager
def listener(*, closes: bool) -> Iterator[tuple[str, list[int]]]:
    """A server that greets nobody: it closes connections, or leaves them alone. Its address, and how many have come."""
    num_come, held = [0], list[socket.socket]()
    ending = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)

        def serve() -> None:
            while not ending.is_set():
                with contextlib.suppress(TimeoutError):
                    connected, _ = server.accept()
                    num_come[0] += 1
                    if closes:
                        connected.close()
                    else:
                        held.append(connected)

        thread = threading.Thread(target=serve, name="kvtier-test-listener")
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}", num_come
        finally:
            ending.set()
            thread.join(WAIT_S)
            for connected in held:
                connected.close()


@pytest.mark.parametrize("closes", [True, False])
def test_an_address_that_greets_nobody_costs_little(closes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one is taken, and this one is not tried again with each lookup."""
    monkeypatch.setattr("kvtier.tiers.pool.pause.PAUSE_S", 10.0)
    with pool_process() as pool, listener(closes=closes) as (bad, num_come):
        fill(pool.block)
        lookups = Lookups([bad, pool.block], connect_timeout_s=0.2)

        async def body() -> None:
            await asyncio.gather(lookups.until_on_loop("red"), lookups.until_on_loop("blue"))
            before = num_come[0]
            assert before <= 2 * 3, "one for each tenant ahead, by its threads, and by the loop"
            for _ in range(50):
                assert await asyncio.gather(lookups.ask("red"), lookups.ask("blue")) == [20, 7]
            assert num_come[0] == before

        run(body)
        lookups.lookup.close()


def test_an_only_address_that_greets_nobody_is_not_tried_with_each_lookup() -> None:
    with listener(closes=True) as (bad, num_come):
        lookups = Lookups([bad], connect_timeout_s=0.2, breaker_failures=1000)

        async def body() -> None:
            for _ in range(100):
                await lookups.ask()

        began_s = time.monotonic()
        run(body)
        num_pauses = (time.monotonic() - began_s) / 0.2
        # Each lookup connects once in a thread, which is for the breaker to bound.
        assert num_come[0] <= 100 + 2 + num_pauses + 1
        lookups.lookup.close()


def test_closing_waits_for_a_connection_that_is_being_opened() -> None:
    with pool_process() as pool, listener(closes=False) as (bad, _):
        fill(pool.block)
        lookups = Lookups([bad, pool.block], connect_timeout_s=0.5)
        assert asyncio.run(lookups.ask()) == 20  # the loop is closed before the connection is there
        lookups.lookup.close()


def test_a_tenant_whose_token_is_wrong_takes_nothing_from_another() -> None:
    with pool_process() as pool:
        fill(pool.block)
        lookups = Lookups(pool.block, environ=TOKENS | {"red": "another-token"})

        async def body() -> None:
            for _ in range(5):
                assert not await lookups.ask("red")
            assert await lookups.ask("red") is None, "nobody knows what the pool has of red's"
            new = [lookups.lookup.num_leading("blue", KEYS["blue"][300:], RANKS) for _ in range(5)]
            assert await asyncio.gather(*new) == [0] * 5, "the pool says that it has none"
            await lookups.until_on_loop("blue")

        run(body)
        lookups.lookup.close()


def test_only_plain_sockets_are_waited_at_by_the_loop() -> None:
    def ways(addresses: Sequence[str], *, tls: bool = False) -> int:
        files = ClientTls(TlsFiles(ca=Path("ca.pem")), None) if tls else None
        access = PoolAccess(addresses=addresses, tenant=tenant_id("red"), token="t", tls=files)
        return len(plain_calls(access))

    assert ways(["127.0.0.1:1"]) == 1
    assert ways(["grpc:127.0.0.1:1", "127.0.0.1:1", "unix:/a"]) == 2
    assert ways(["grpc:127.0.0.1:1"]) == 0
    assert ways(["127.0.0.1:1"], tls=True) == 0
    assert ways(["127.0.0.1:1", "unix:/a"], tls=True) == 1
