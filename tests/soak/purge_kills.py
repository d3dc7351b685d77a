"""Kills a pool at many moments of a purge, with Redis well, hung or dead meanwhile, and looks what is left.

    python tests/soak/purge_kills.py --rounds 40 --seed 7

After each kill the pool starts again: the other tenant has all its blocks, and what is still there of the purged one is
right. Then the purge is run again, and no byte of the tenant is on disk or in Redis. Ends with 1 when something was
found.
"""

import argparse
import contextlib
import http.client
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "rigs"))

from configured_pool import BOSS, OLD, OTHER, Pool, running
from kvtier.identity.keys import TenantId
from kvtier.testing.contract import make_key, read_blocks
from pool_rig import BLUE, RED, connect, until
from purge_rig import (
    BLOCK_BYTES,
    NUM_BLOCKS,
    fill,
    in_dump,
    in_redis,
    marks,
    on_disk,
    payload,
    tiers_of,
)
from redis_rig import RedisServer, running_redis

LABELS = range(NUM_BLOCKS)
_PURGE_S = 120.0
_FAULTS = ("redis is well", "redis hangs", "redis dies")


class PurgeKills:
    """Rounds over one folder and one Redis. One thread."""

    def __init__(self, folder: Path, redis: RedisServer, seed: int, say: Callable[[str], None]) -> None:
        self._redis, self._say = redis, say
        self._random = random.Random(seed)
        self._path = tiers_of(folder / "pool.toml", redis)
        self._num_purges = 0
        """How many the log tells of."""

    def run(self, rounds: int) -> None:
        """Raises `AssertionError` where something is wrong."""
        with running(self._path) as pool:
            fill(pool, self._path, ways=1)
            self._landed(pool)
            whole_s = self._purge_whole(pool)
        for number in range(rounds):
            fault = _FAULTS[number % len(_FAULTS)]
            at_s, into_s = (whole_s * self._random.random() ** 2 for _ in range(2))  # most is removed soon
            left = self._round(fault, at_s, into_s)
            self._say(f"round {number}: {fault}, killed {at_s:.3f} s into a purge of {whole_s:.3f} s: {left} were left")

    def _round(self, fault: str, at_s: float, into_s: float) -> str:
        with running(self._path) as pool:
            assert self._found(pool, "red", RED, OLD) == 0, "what was purged has come back"
            fill(pool, self._path, ["red"], ways=1)
            self._landed(pool)
            asker = threading.Thread(target=self._ask, args=(pool, "POST", "/tenants/red/purge"))
            asker.start()
            self._num_purges += 1
            pool.says('"event": "purge"', times=self._num_purges)
            with self._broken(fault, into_s):
                time.sleep(at_s)
                pool.service.kill()
            asker.join()
        in_redis_now = in_redis(self._redis, RED)
        if fault == "redis dies":
            assert in_redis_now == 0, "nothing of it is on disk"
        with running(self._path) as pool:
            there = self._found(pool, "red", RED, OLD)
            if fault != "redis dies":
                assert self._found(pool, "blue", BLUE, OTHER) == len(LABELS)
            self._purge_whole(pool)
        return f"{there} blocks, {in_redis_now} values"

    @contextlib.contextmanager
    def _broken(self, fault: str, into_s: float) -> Iterator[None]:
        """Inside, Redis does what the fault says, after a time; behind it, all is well."""
        with contextlib.ExitStack() as stack:
            if fault != "redis is well":
                time.sleep(into_s)
            if fault == "redis hangs":
                stack.enter_context(self._redis.stopped())
            elif fault == "redis dies":
                self._redis.kill()
                stack.callback(self._redis.start)
            yield

    def _landed(self, pool: Pool) -> None:
        until(lambda: in_redis(self._redis, RED) == len(LABELS))
        until(
            lambda: self._ask(pool, "GET", "/tenants")["tenants"]["red"]["tiers"]["disk"]["num_blocks"] == len(LABELS)
        )

    def _found(self, pool: Pool, name: str, tenant: TenantId, token: str) -> int:
        """How many blocks are there; every one must be right."""
        tier = connect(pool.block.split(",")[0], name, token=token)
        answers = read_blocks(tier, [make_key(label, tenant=tenant) for label in LABELS], BLOCK_BYTES)
        tier.close()
        wrong = [n for n, each in zip(LABELS, answers, strict=True) if each is not None and each != payload(name, n)]
        assert not wrong, f"wrong bytes in blocks {wrong} of {name}"
        return len(answers) - answers.count(None)

    def _purge_whole(self, pool: Pool) -> float:
        """Purges, and looks for bytes that are left. How long the purge took."""
        self._num_purges += 1
        began_s = time.monotonic()
        report = self._ask(pool, "POST", "/tenants/red/purge")
        took_s = time.monotonic() - began_s
        assert report["problems"] == []
        left = [on_disk(self._path, marks("red")), in_redis(self._redis, RED), in_dump(self._redis, marks("red"))]
        assert left == [0, 0, 0], f"on disk, in Redis, in what Redis saves: {left}"
        return took_s

    def _ask(self, pool: Pool, method: str, path: str) -> dict[str, Any]:
        """What the pool answers to an operator; nothing when it dies."""
        connection = http.client.HTTPConnection(pool.http, timeout=_PURGE_S)
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            connection.request(method, path, headers={"Authorization": f"Bearer {BOSS}"})
            answer: dict[str, Any] = json.loads(connection.getresponse().read())
            return answer
        return {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30), help="of the moments")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="kvtier-purge-") as home:
        (redis_folder := Path(home) / "redis").mkdir()
        with running_redis(redis_folder) as redis:
            kills = PurgeKills(Path(home), redis, arguments.seed, lambda line: print(line, flush=True))
            try:
                kills.run(arguments.rounds)
            except AssertionError as error:
                print(f"PROBLEM: {error}", flush=True)
                return 1
    print(f"{arguments.rounds} rounds: nothing wrong")
    return 0


if __name__ == "__main__":
    sys.exit(main())
