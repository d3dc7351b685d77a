"""A round of the kills of purges in `make chaos`."""

import random
from pathlib import Path

from purge_kills import PurgeKills
from redis_rig import running_redis


def test_a_purge_that_is_killed_anywhere_is_finished_by_the_next_one(tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    (tmp_path / "redis").mkdir()
    with running_redis(tmp_path / "redis") as redis:
        PurgeKills(tmp_path, redis, seed, print).run(rounds=1)
