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
    request_s, block_bytes = prices.request_s, block * prices.kv_bytes_per_token
    cut, fetch_s, compute_s = device, 0.0, request_s + prices.compute_s(device * block, tokens)
    host_s = (local - device) * block_bytes / prices.host_bytes_per_s
    if local > device:
        rest_s = request_s + prices.compute_s(local * block, tokens)
        if host_s + rest_s < compute_s:
            cut, fetch_s, compute_s = local, host_s, rest_s
    pool, bandwidth = min(num_in_pool, last), prices.pool_bytes_per_s
    if pool > local and bandwidth > 0:
        pool_s = host_s + (pool - local) * block_bytes / bandwidth
        rest_s = request_s + prices.compute_s(pool * block, tokens)
        if pool_s + rest_s < fetch_s + compute_s:
            cut, fetch_s, compute_s = pool, pool_s, rest_s
    return Work(cut, fetch_s, compute_s)
