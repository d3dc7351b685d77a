"""What answering a prompt costs an engine: what is fetched, what is computed, and when the first token is there."""

from typing import NamedTuple

from kvtier_gateway.routing.kv_index import Runs
from kvtier_gateway.routing.values import Prices, Prompt


class Work(NamedTuple):
    """The cheapest way to a first token at an engine that is idle."""

    cut: int
    """Leading blocks that are not computed."""
    fetch_s: float
    compute_s: float


def cheapest(prices: Prices, prompt: Prompt, runs: Runs, num_in_pool: int) -> Work:
    """Returns the work with the least time over all cuts: blocks before the cut are fetched, and the rest computed.

    To fetch all or nothing from host memory or the pool is best. A token costs the same to fetch wherever it stands,
    and more to compute the later it stands, so that the time is a concave function of the cut, and least at an end.
    """
    block, tokens = prompt.tokens_per_block, prompt.num_tokens or 0
    last = max(0, tokens - 1) // block if block else 0  # one token at least is computed
    device, local = min(runs.device, last), min(runs.local, last)
    best = Work(device, 0.0, prices.request_s + prices.compute_s(device * block, tokens))
    block_bytes = block * prices.kv_bytes_per_token
    host_s = (local - device) * block_bytes / prices.host_bytes_per_s
    ways = [(local, host_s)]
    if prices.pool_bytes_per_s > 0:
        pool = min(num_in_pool, last)
        ways.append((pool, host_s + (pool - local) * block_bytes / prices.pool_bytes_per_s))
    for cut, fetch_s in ways:
        if cut > best.cut:
            compute_s = prices.request_s + prices.compute_s(cut * block, tokens)
            if fetch_s + compute_s < best.fetch_s + best.compute_s:
                best = Work(cut, fetch_s, compute_s)
    return best
