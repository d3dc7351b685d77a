"""What a cache pool says of itself: which of its verbs were used, and how many blocks it has got."""

import re
import urllib.request
from collections import Counter

from kvtier_bench.processes.pool_process import PoolProcess

_TIMEOUT_S = 30.0
_CALL = re.compile(r'^kvtier_pool_block_calls_total\{.*verb="(\w+)".*\} (\S+)$', re.MULTILINE)
_WRITTEN = re.compile(r'^kvtier_pool_written_blocks_total\{.*status="stored".*\} (\S+)$', re.MULTILINE)


def calls_by_verb(pool: PoolProcess) -> Counter[str]:
    """Counts the calls so far over the block protocol."""
    counts: Counter[str] = Counter()
    for verb, count in _CALL.findall(_metrics(pool)):
        counts[verb] += int(float(count))
    return counts


def num_written(pool: PoolProcess) -> int:
    """Blocks stored so far."""
    return sum(int(float(count)) for count in _WRITTEN.findall(_metrics(pool)))


def _metrics(pool: PoolProcess) -> str:
    with urllib.request.urlopen(f"http://{pool.http}/metrics", timeout=_TIMEOUT_S) as response:
        text: str = response.read().decode()
    return text
