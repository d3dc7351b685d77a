"""A secret is replaced: pages of the old one are found, read, and have their own names from then on."""

from typing import Any

import pytest
from storage_rig import (
    ALONE,
    CachePool,
    PoolName,
    count,
    digests,
    extra,
    host_pool,
    indices,
    page_bytes,
    storage,
    transfer,
)

SECRETS = {"OLDEST": "the oldest secret of red, long enough", "OLD": "the old secret of red, which is long enough"}
LATER, LONG_AGO = "2099-01-01T00:00:00Z", "2020-01-01T00:00:00Z"


@pytest.fixture(autouse=True)
def _secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, secret in SECRETS.items():
        monkeypatch.setenv(name, secret)


def of_red(secret: str, *previous: str, retire_at: str = LATER, salt: str | None = None) -> dict[str, Any]:
    """The tables of tenants, for `storage`."""
    red = extra()["tenants"]["red"] | {"secret": f"env:{secret}"}
    red["previous_secrets"] = [{"secret": f"env:{name}", "retire_at": retire_at} for name in previous]
    return {"tenants": {"red": red if salt is None else red | {"salt": salt}}}


def test_pages_of_previous_secrets_are_found_and_get_names_of_their_own(pool: CachePool) -> None:
    keys, mine, theirs = digests(6, start=71), host_pool(seed=71), host_pool()
    with storage(pool, mine, **of_red("OLDEST")) as made:
        assert made.batch_set_v1(keys[:4], indices(0, 1, 2, 3)) == [True] * 4
    new = of_red("KV_SECRET", "OLD", "OLDEST")
    with storage(pool, theirs, **new) as made:
        assert made.batch_set_v1(keys[:1], indices(9)) == [True], "a page of its own, of zeros"
        assert made.batch_exists(keys) == 4
        assert made.batch_get_v1(keys[:4], indices(4, 5, 6, 7)) == [True] * 4
        assert (count(made, "read", "hit"), count(made, "read", "previous")) == (4, 3)
    assert [page_bytes(theirs, page) for page in (5, 6, 7)] == [page_bytes(mine, page) for page in (1, 2, 3)]
    assert not any(page_bytes(theirs, 4)), "what the present secret names goes before"
    fresh = host_pool()
    with storage(pool, fresh, **of_red("KV_SECRET")) as made:
        assert made.batch_exists(keys) == 4, "without the previous secret"
        assert made.batch_get_v1(keys[:4], indices(0, 1, 2, 3)) == [True] * 4
        assert count(made, "read", "previous") == 0
    assert [page_bytes(fresh, page) for page in (1, 2, 3)] == [page_bytes(mine, page) for page in (1, 2, 3)]


def test_pages_of_side_pools_come_along(pool: CachePool) -> None:
    keys, mine, side = digests(3, start=72), host_pool(seed=72), host_pool(seed=73)
    swa = (PoolName.SWA, side)
    with storage(pool, mine, swa, **of_red("OLD")) as made:
        assert made.batch_set_v1(keys, indices(0, 1, 2)) == [True] * 3
        assert made.batch_set_v2([transfer(PoolName.SWA, keys, 3, 4, 5)]) == {PoolName.SWA: [True] * 3}
    theirs, other = host_pool(), host_pool()
    with storage(pool, theirs, (PoolName.SWA, other), **of_red("KV_SECRET", "OLD")) as made:
        assert made.batch_exists_v2(keys, [transfer(PoolName.SWA, keys)]).kv_hit_pages == 3
        assert made.batch_get_v2([transfer(PoolName.SWA, keys, 0, 1, 2)]) == {PoolName.SWA: [True] * 3}
        assert made.batch_get_v1(keys, indices(0, 1, 2)) == [True] * 3
    assert [page_bytes(other, page) for page in range(3)] == [page_bytes(side, page) for page in (3, 4, 5)]
    assert [page_bytes(theirs, page) for page in range(3)] == [page_bytes(mine, page) for page in range(3)]


def test_a_page_of_a_previous_secret_is_written_by_its_own_name_too(pool: CachePool) -> None:
    keys, mine = digests(2, start=74), host_pool(seed=74)
    with storage(pool, mine, **of_red("OLD")) as made:
        assert made.batch_set_v1(keys, indices(0, 1)) == [True] * 2
    with storage(pool, mine, **of_red("KV_SECRET", "OLD")) as made:
        assert made.batch_set_v1(keys, indices(0, 1)) == [True] * 2
        assert (count(made, "write", "exists"), count(made, "write", "stored")) == (0, 2)


def test_what_was_found_under_a_previous_secret_is_cleared_too(pool: CachePool) -> None:
    keys, mine = digests(2, start=76), host_pool(seed=76)
    with storage(pool, mine, **of_red("OLD")) as made:
        assert made.batch_set_v1(keys, indices(0, 1)) == [True] * 2
    with storage(pool, host_pool(), **of_red("KV_SECRET", "OLD")) as made:
        assert made.batch_exists(keys) == 2
        made.clear()
        assert made.batch_exists(keys) == 0


@pytest.mark.parametrize(
    "stranger",
    [
        of_red("KV_SECRET", "OLD", retire_at=LONG_AGO),
        of_red("KV_SECRET", "OLDEST"),
        of_red("KV_SECRET", "OLD", salt="x"),
    ],
    ids=["retired", "another one", "another salt"],
)
def test_what_no_secret_of_theirs_has_named_is_not_found(pool: CachePool, stranger: dict[str, Any]) -> None:
    keys, mine = digests(2, start=75), host_pool(seed=75)
    with storage(pool, mine, **of_red("OLD")) as made:
        assert made.batch_set_v1(keys, indices(0, 1)) == [True] * 2
    with storage(pool, host_pool(), config=ALONE, **stranger) as made:
        assert made.batch_exists(keys) == 0
        assert made.batch_get_v1(keys, indices(0, 1)) == [False] * 2
