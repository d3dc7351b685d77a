"""Redis Cluster in tests: blocks enough for each node to have some, and the way there."""

from kvtier.testing.contract import make_key, make_payload, summed
from redis_rig import RedisServer

BLOCK_BYTES = 64 * 1024
NUM_BLOCKS = 48
KEYS = [make_key(i) for i in range(NUM_BLOCKS)]
PAYLOADS = [make_payload(i, BLOCK_BYTES) for i in range(NUM_BLOCKS)]
ITEMS = [summed(*block) for block in zip(KEYS, PAYLOADS, strict=True)]


def cluster_url(*nodes: RedisServer) -> str:
    return f"redis+cluster://{','.join(f'127.0.0.1:{node.port}' for node in nodes)}"
