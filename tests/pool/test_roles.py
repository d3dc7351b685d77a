"""Rights at each door: every role, credential, way and verb, beside what is to come of it."""

import http.client
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from configured_pool import BOSS, NEW, OLD, OTHER, Pool, configuration, digest, running
from kvtier.config.credentials import Role
from kvtier.identity.keys import TenantId
from kvtier.metrics import Metrics
from kvtier.testing.contract import make_key, make_payload, read_blocks, summed
from kvtier.tiers.base import Status, WriteStatus
from kvtier.tiers.common.breaker import CircuitBreaker
from kvtier.tiers.pool.access import PoolAccess, open_transport
from kvtier.tiers.pool.tier import PoolTier
from pool_rig import BLOCK_BYTES, BLUE, RED, WAIT_S

EXPIRED, UNKNOWN = "a-token-that-has-expired", "a-token-of-nobody-at-all"
TOKEN_OF = {"red": OLD, "blue": OTHER, "operator": BOSS, "observer": NEW, "expired": EXPIRED, "unknown": UNKNOWN}
WAYS = ("tcp", "unix", "shared memory", "grpc")
PAYLOAD = make_payload("roles", BLOCK_BYTES)


class World(NamedTuple):
    """A pool with both tenants' blocks in it."""

    pool: Pool
    unix: str

    def tier(self, way: str, token: str, tenant: TenantId) -> PoolTier:
        addresses = {"tcp": self.pool.block.split(",")[0], "grpc": f"grpc:{self.pool.grpc}"}
        access = PoolAccess(
            addresses=[addresses.get(way, self.unix)], tenant=tenant, token=token, shared_memory=way == "shared memory"
        )
        metrics = Metrics()
        transport = open_transport(access, metrics, connect_ahead=False)
        return PoolTier(transport, tenant, metrics=metrics, breaker=CircuitBreaker(1000, 0.05), call_timeout_s=WAIT_S)

    def http(self, method: str, path: str, token: str | None) -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPConnection(self.pool.http, timeout=WAIT_S)
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        body = json.loads(answer.read())
        connection.close()
        return answer.status, body


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("roles")
    unix = f"unix:{folder}/pool.sock"
    roles = f'[operators.boss]\ntoken_sha256 = ["{digest(BOSS)}"]\n[observers.bob]\ntoken_sha256 = ["{digest(NEW)}"]\n'
    red = f'"{digest(OLD)}", {{sha256 = "{digest(EXPIRED)}", expires_at = 2020-01-01T00:00:00Z}}'
    path = configuration(folder / "pool.toml", red, roles)
    path.write_text(path.read_text().replace('listen = ["127.0.0.1:0"]', f'listen = ["127.0.0.1:0", "{unix}"]', 1))
    with running(path) as pool:
        world = World(pool, unix)
        for tenant, token in ((RED, OLD), (BLUE, OTHER)):
            tier = world.tier("tcp", token, tenant)
            assert tier.write([summed(make_key("roles", tenant=tenant), PAYLOAD)]) == [WriteStatus.STORED]
            tier.close()
        yield world


def _lookup(tier: PoolTier, tenant: TenantId) -> bool:
    return tier.lookup([make_key("roles", tenant=tenant)]) == [Status.HIT]


def _read(tier: PoolTier, tenant: TenantId) -> bool:
    return read_blocks(tier, [make_key("roles", tenant=tenant)], BLOCK_BYTES) == [PAYLOAD]


def _write(tier: PoolTier, tenant: TenantId) -> bool:
    status = tier.write([summed(make_key(("roles", "more"), tenant=tenant), PAYLOAD)])
    return status in ([WriteStatus.STORED], [WriteStatus.EXISTS])


def _discard(tier: PoolTier, tenant: TenantId) -> bool:
    key = make_key(("roles", "discard"), tenant=tenant)
    tier.write([summed(key, PAYLOAD)])
    return tier.discard([key]) == 1


def _usage(tier: PoolTier, tenant: TenantId) -> bool:
    return tier.usage().num_blocks > 0


VERBS: dict[str, Callable[[PoolTier, TenantId], bool]] = {
    "lookup": _lookup,
    "read": _read,
    "write": _write,
    "discard": _discard,
    "usage": _usage,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("claimed", ["red", "blue"])
@pytest.mark.parametrize("credential", TOKEN_OF)
def test_blocks_are_their_tenants_alone(world: World, way: str, claimed: str, credential: str) -> None:
    """Only a tenant's own token does anything for it, whatever the peer says whose blocks it wants."""
    tenant, other = (RED, "blue") if claimed == "red" else (BLUE, "red")
    before = _num_blocks(world)

    def does(verb: str) -> bool:
        tier = world.tier(way, TOKEN_OF[credential], tenant)
        try:
            return VERBS[verb](tier, tenant)
        finally:
            tier.close()

    with ThreadPoolExecutor(len(VERBS)) as threads:  # who is refused waits a moment for the answer
        done = dict(zip(VERBS, threads.map(does, VERBS), strict=True))
    if credential == claimed:
        assert all(done.values()), done
    elif credential == other:  # does what it may, among blocks of its own
        assert _num_blocks(world)[claimed] == before[claimed]
    else:
        assert not any(done.values()), done
        assert _num_blocks(world) == before
    rightful = world.tier("tcp", TOKEN_OF[claimed], tenant)
    assert _read(rightful, tenant), "nobody else has changed or removed it"
    rightful.close()


def _num_blocks(world: World) -> dict[str, int]:
    report = world.http("GET", "/tenants", BOSS)[1]["tenants"]
    return {name: figures["tiers"]["memory"]["num_blocks"] for name, figures in report.items()}


SEEN = {
    "red": (200, {"red"}),
    "blue": (200, {"blue"}),
    "operator": (200, {"red", "blue"}),
    "observer": (200, None),
    "expired": (401, None),
    "unknown": (401, None),
}


@pytest.mark.parametrize("credential", TOKEN_OF)
def test_figures_by_role(world: World, credential: str) -> None:
    code, answer = world.http("GET", "/tenants", TOKEN_OF[credential])
    wanted_code, names = SEEN[credential]
    assert code == wanted_code, answer
    assert set(answer.get("tenants", ())) == (names or set())
    if credential == Role.OBSERVER:
        assert answer["num_tenants"] == 2
        assert set(answer["tiers"]["memory"]) == {"capacity_bytes", "used_percent", "state"}
    if code == 401:
        assert TOKEN_OF[credential] not in json.dumps(answer)


def test_without_credentials_nothing_is_told(world: World) -> None:
    assert world.http("GET", "/tenants", None)[0] == 401
    assert world.http("POST", "/tenants", BOSS)[0] == 404


def test_no_token_is_taken_in_the_clear_from_other_machines(tmp_path: Path) -> None:
    path = configuration(tmp_path / "pool.toml", f'"{digest(OLD)}"')
    path.write_text(path.read_text().replace('http_listen = "127.0.0.1:0"', 'http_listen = "0.0.0.0:0"'))
    with running(path) as pool:
        pool.http = pool.http.replace("0.0.0.0", "127.0.0.1")
        code, answer = World(pool, "").http("GET", "/tenants", OLD)
        assert (code, "pool_service.insecure" in answer["error"]) == (403, True)
