"""`/metrics`: who may see which series, and how often they are made for whoever asks."""

import threading
import urllib.error
import urllib.request

import pytest

from clock_rig import StillClock
from configured_pool import BOSS, NEW, digest
from kvtier.errors import ConfigError
from kvtier_pool.http_metrics import Page
from kvtier_pool.service import PoolService
from pool_rig import TOKENS, WAIT_S, connect, keys, pool_config, running_pool, until

ROLES = {
    "operators": {"boss": {"token_sha256": [digest(BOSS)]}},
    "observers": {"bob": {"token_sha256": [digest(NEW)]}},
}
OF_RED = 'tenant="red"'
TOTAL = 'kvtier_pool_tenant_refusals_total{limit="max_requests_per_s"}'


def page(address: str, token: str | None) -> tuple[int, str]:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(f"http://{address}/metrics", headers=headers)) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.parametrize(
    ("access", "stranger", "what_it_reads"), [("open", 200, TOTAL), ("observer", 401, "no credentials")]
)
def test_single_tenants_are_for_operators_alone(access: str, stranger: int, what_it_reads: str) -> None:
    bounds = {name: {"max_requests_per_s": 1} for name in TOKENS}
    with running_pool(metrics_access=access, roles=ROLES, rates=bounds) as pool:
        for name in TOKENS:
            tier = connect(pool.block[0], name)
            for _ in range(3):
                tier.lookup(keys([0], tier._tenant))
            tier.close()
        code, text = page(pool.http, None)
        assert (code, what_it_reads in text, OF_RED in text) == (stranger, True, False)
        code, text = page(pool.http, NEW)
        assert (code, TOTAL in text, OF_RED in text) == (200, True, False)
        code, text = page(pool.http, BOSS)
        assert (code, TOTAL in text, OF_RED in text) == (200, False, True)
        assert page(pool.http, TOKENS["red"])[0] == 403
        assert page(pool.http, "a-token-of-nobody-at-all")[0] == 401


def test_a_page_that_nobody_could_read_is_said_at_the_start() -> None:
    config = pool_config(http_listen="0.0.0.0:0", metrics_access="observer")
    with pytest.raises(ConfigError, match=r"metrics_access: nobody could read /metrics: .*in the clear"):
        PoolService(config).start()


class Maker:
    """Makes pages when it may, and counts them."""

    def __init__(self, clock: StillClock) -> None:
        self.clock = clock
        self.num_begun = 0
        self.may_end = threading.Event()

    def __call__(self) -> bytes:
        self.num_begun += 1
        number = self.num_begun
        assert self.may_end.wait(WAIT_S)
        self.clock.now_s += 1.0
        return b"%d" % number


def test_many_who_ask_share_one_page_and_nobody_gets_an_older_one_than_the_request() -> None:
    clock = StillClock()
    maker = Maker(clock)
    of_all = Page(maker, clock)
    texts: list[bytes] = []

    def ask() -> threading.Thread:
        thread = threading.Thread(target=lambda: texts.append(of_all.text()))
        thread.start()
        return thread

    first = ask()
    until(lambda: maker.num_begun == 1)
    others = [ask() for _ in range(20)]
    until(lambda: len(of_all._changed._waiters) == 20)  # type: ignore[attr-defined]
    maker.may_end.set()
    first.join(WAIT_S)
    assert (texts, maker.num_begun) == ([b"1"], 1), "there is a pause of nine seconds now"
    clock.now_s += 9.0
    with of_all._changed:
        of_all._changed.notify_all()
    for thread in others:
        thread.join(WAIT_S)
    assert (texts, maker.num_begun) == ([b"1"] + [b"2"] * 20, 2)


def test_a_page_that_fails_fails_for_one() -> None:
    made = iter([ValueError("no"), b"yes"])

    def make() -> bytes:
        text = next(made)
        if isinstance(text, Exception):
            raise text
        return text

    of_all = Page(make, StillClock())
    with pytest.raises(ValueError, match="no"):
        of_all.text()
    assert of_all.text() == b"yes"
