"""One engine for several tenants: whose a request is, its gateway says, and vLLM's own prefix cache knows it too."""

import logging
from collections.abc import Callable

import pytest
from stepping_rank import BLOCK
from stepping_rig import Engine

from cache_pool import CachePool
from kvtier.errors import ConfigError

Start = Callable[..., Engine]
NUM_TOKENS = 100
NUM_HIT = (NUM_TOKENS - 1) // BLOCK * BLOCK
RED, BLUE = {"tenant": "red"}, {"tenant": "blue"}


def spared(engine: Engine, **how: object) -> int:
    """Tokens that the next request for the same prompt need not compute, wherever they come from."""
    request_id = engine.ask(1, NUM_TOKENS, **how)  # type: ignore[arg-type]
    engine.finish()
    engine.require_right_answers()
    return engine.spared[request_id]


def test_tenants_of_a_gateway_never_meet(start: Start) -> None:
    engine = start(gateway=["blue"])
    assert spared(engine, params=RED) == 0
    assert spared(engine, params=BLUE) == 0, "blue met what red left on the device"
    assert spared(engine, params=BLUE) == NUM_HIT
    engine.forget_device()
    assert spared(engine, params=BLUE) == NUM_HIT, "from host memory"
    assert spared(engine, params=RED) == NUM_HIT, "the engine's own tenant may be named as well"


def test_what_only_one_tenant_has_is_nobody_elses(start: Start) -> None:
    engine = start(gateway=["blue"])
    assert spared(engine, params=BLUE) == 0
    engine.forget_device()
    assert spared(engine, params=RED) == 0, "red met what blue left in host memory"


def test_salts_are_told_apart_within_a_tenant(start: Start) -> None:
    engine = start(gateway=["blue"])
    for salt in (None, "", "one", "blue", "blue/one"):
        assert spared(engine, params=BLUE, salt=salt) == 0, salt
        assert spared(engine, params=RED, salt=salt) == 0, salt
    engine.forget_device()
    for salt in (None, "", "one", "blue", "blue/one"):
        assert spared(engine, params=BLUE, salt=salt) == NUM_HIT, salt


@pytest.mark.parametrize(
    "params",
    [{"tenant": "green"}, {"tenant": ""}, {"tenant": 10**5000}, {"tenant": ["blue"]}],
    ids=["green", "empty", "a number", "a list"],
)
@pytest.mark.parametrize("gateway", [(), ("blue",)], ids=["without a gateway", "with one"])
def test_whoever_names_another_tenant_meets_nobody(
    start: Start, params: dict[str, object], gateway: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    engine = start(gateway=gateway)
    red = RED if gateway else None
    spared(engine, params=red)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert spared(engine, params=params) == 0, "not even itself"
    assert caplog.text.count("gateway_tenants") == 1, "said once"
    engine.forget_device()
    assert spared(engine, params=params) == 0
    assert spared(engine, params=red) == NUM_HIT, "red is served as before"


@pytest.mark.parametrize("tenant", [None, "red"])
def test_no_tenant_is_no_cache(start: Start, tenant: str | None) -> None:
    """vLLM's beam search and pooling do not pass on what requests say: they must not be taken for the engine's own."""
    engine = start(tenant=tenant, gateway=["blue"])
    assert [spared(engine), spared(engine)] == [0, 0]
    assert [spared(engine, params=BLUE), spared(engine, params=BLUE)] == [0, NUM_HIT]


@pytest.mark.parametrize("disk", [False, True], ids=["pool", "disk and pool"])
def test_each_tenant_shares_with_its_own_engines(start: Start, pool: CachePool, disk: bool) -> None:
    first = start(gateway=["blue"], pool=pool.address, disk=disk)
    assert spared(first, params=BLUE, salt="x") == 0
    pool.await_written(NUM_HIT // BLOCK)
    first.close()
    own = start(tenant=None, gateway=["blue"], pool=pool.address) if disk else start(tenant="blue", pool=pool.address)
    if disk:
        assert spared(own, params=BLUE, salt="x") == NUM_HIT
    else:
        assert spared(own, salt="x") == NUM_HIT, "an engine of blue alone finds the same blocks"
    own.close()
    other = start(tenant="red", pool=pool.address, disk=disk)
    assert spared(other, salt="x") == 0
    other.close()
    again = start(gateway=["blue"], pool=pool.address, disk=disk)
    assert spared(again, params=RED, salt="x") == NUM_HIT, "red, of what red has just stored"


def test_hashes_that_can_be_made_equal_are_refused(start: Start) -> None:
    with pytest.raises(ConfigError, match="xxhash: tenants could make others' blocks hit; use sha256"):
        start(gateway=["blue"], hash_algorithm="xxhash")
    engine = start(hash_algorithm="xxhash")
    assert [spared(engine), spared(engine)] == [0, NUM_HIT]
