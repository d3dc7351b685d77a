"""A pool reached by gRPC: services in this process, the tier over them, the blocks that it is given."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pool_rig
from kvtier.testing.blocks import make_key, make_payload, summed
from kvtier.tiers.base import Item
from kvtier.tiers.pool.tier import PoolTier
from pool_rig import BLOCK_BYTES, MIB

PAYLOADS = {i: make_payload(i, BLOCK_BYTES) for i in range(16)}


def items(count: int) -> list[Item[bytes]]:
    return [summed(make_key(i), PAYLOADS[i]) for i in range(count)]


def connect(address: str, tenant: str = "red", **options: Any) -> PoolTier:
    return pool_rig.connect(f"grpc:{address}", tenant, **options)


@contextlib.contextmanager
def running(memory_bytes: int = 16 * MIB, **settings: Any) -> Iterator[str]:
    """A service in this process; its gRPC address."""
    with pool_rig.running_pool(memory_bytes, **settings) as addresses:
        yield addresses.grpc[0]
