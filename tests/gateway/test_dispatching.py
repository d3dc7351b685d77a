"""What strategies are told of engines: their prices, and how busy this gateway keeps them."""

import asyncio
import contextlib
from collections.abc import Sequence

import aiohttp
from prometheus_client import CollectorRegistry

from kvtier.config.gateway import GatewayConfig, GatewayEngineConfig
from kvtier.identity.keys import NamespaceId
from kvtier_gateway.dispatching import Dispatching
from kvtier_gateway.engines.engine import Engine, KeyForm
from kvtier_gateway.engines.fleet import Fleet
from kvtier_gateway.engines.price_list import PriceList
from kvtier_gateway.engines.session import EngineSession
from kvtier_gateway.metrics import GatewayMetrics
from kvtier_gateway.routing.round_robin import RoundRobin
from kvtier_gateway.routing.values import DEFAULT_PRICES, Candidate, Choice, Load, Prompt

FORM = KeyForm(16, frozenset([NamespaceId(bytes(16))]))


def engine(number: int, *models: str, token_s: float | None = None, pool_bytes_per_s: float | None = None) -> Engine:
    table = GatewayEngineConfig(url=f"http://127.0.0.1:{8000 + number}")
    made = Engine(table.url, table, is_up=True, key_form=FORM, models={name: {} for name in models} or None)
    made.prices.token_s, made.prices.pool_bytes_per_s = token_s, pool_bytes_per_s
    return made


def test_what_was_not_learned_of_an_engine_was_of_others_with_its_models() -> None:
    engines = [
        engine(0, "a", "b", token_s=1.0, pool_bytes_per_s=100.0),
        engine(1, "b", "a", token_s=3.0),
        engine(2, "b", "a"),
        engine(3, "b", "a"),
        engine(4, "a"),
        engine(5, token_s=7.0),
    ]
    engines[0].prices.block_bytes = 320.0
    prices = PriceList().of(engines, 0.0)
    assert [prices[each].token_s for each in engines] == [1.0, 3.0, 2.0, 2.0, DEFAULT_PRICES.token_s, 7.0]
    assert [prices[each].pool_bytes_per_s for each in engines] == [100.0] * 4 + [2e9] * 2
    assert [prices[each].kv_bytes_per_token for each in engines] == [20] * 4 + [DEFAULT_PRICES.kv_bytes_per_token] * 2
    assert prices[engines[2]] is prices[engines[3]], "engines that cost the same are priced once"


def test_without_kvtier_and_with_nothing_learned_there_is_no_pool() -> None:
    plain = engine(0, "a")
    plain.key_form = None
    plain.prices.block_bytes = 320.0  # of blocks whose size in tokens is not known
    assert PriceList().of([plain], 0.0)[plain] == DEFAULT_PRICES


def test_prices_are_worked_out_anew_after_a_while_and_for_engines_that_come() -> None:
    first, second = engine(0, "a", token_s=1.0), engine(1, "a")
    listed, alone = PriceList(), [first]
    assert listed.of(alone, 10.0)[first].token_s == 1.0
    first.prices.token_s = 2.0
    assert listed.of(alone, 10.2)[first].token_s == 1.0
    assert listed.of(alone, 10.3)[first].token_s == 2.0
    assert listed.of([first, second], 10.3)[second].token_s == 2.0


class Noting(RoundRobin):
    """Notes what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Sequence[Candidate]] = []

    def choose(self, prompt: Prompt, candidates: Sequence[Candidate], now_s: float) -> Choice:
        self.told.append(candidates)
        return super().choose(prompt, candidates, now_s)


def test_requests_count_as_waiting_until_their_first_byte_and_until_they_end() -> None:
    async def body() -> None:
        async with aiohttp.ClientSession() as over:
            metrics = GatewayMetrics(CollectorRegistry())
            fleet = Fleet(EngineSession(over), GatewayConfig(), metrics)
            first, second, other = fleet.engines = [engine(0, "a"), engine(1, "a"), engine(2, "other")]
            strategy = Noting()
            dispatching = Dispatching(strategy, fleet, metrics)

            def loads() -> list[Load]:
                assert dispatching.choose(Prompt(), "a", ()) is not None
                return [candidate.load for candidate in strategy.told[-1]]

            with other.holding(), first.holding() as attempt:
                with contextlib.suppress(ZeroDivisionError), first.holding() as failing:
                    assert loads() == [Load(waiting=2), Load()]
                    for _ in range(2):  # a second byte is no second answer
                        first.note_begun(attempt)
                        assert loads() == [Load(running=1, waiting=1), Load()]
                    first.note_begun(failing)
                    raise ZeroDivisionError
                assert loads() == [Load(running=1), Load()]
            assert loads() == [Load(), Load()]
            assert dispatching.choose(Prompt(), "a", [first]) is not None
            assert [candidate.engine for candidate in strategy.told[-1]] == [second.url]
            assert dispatching.choose(Prompt(), "a", [first, second]) is None

    asyncio.run(body())
