"""Requests that name thousands of blocks: what all of a tenant's connections have of them in memory is bounded."""

import socket
import threading
import tracemalloc

import pytest

from block_rig import GOLDEN, receive_frame
from kvtier.codec.stored_form import HEADER_BYTES, encode_header
from kvtier.errors import InvalidInputError, UnavailableError
from kvtier.net.address import Address
from kvtier.protocol.block import encode_head
from kvtier.tiers.base import Status
from kvtier_pool.block.announced import AnnouncedBlocks
from kvtier_pool.block.large_requests import LargeRequests
from kvtier_pool.limits import PoolLimits
from pool_rig import BLUE, RED, WAIT_S, connect, items, keys, running_pool, until


def test_a_tenant_waits_for_its_own_requests_and_for_nobody_elses() -> None:
    large = LargeRequests(100)
    large.take(RED, 60, 0.0)
    with pytest.raises(UnavailableError, match="60 bytes of large requests under way, and 100 is the most"):
        large.take(RED, 60, 0.0)
    large.take(BLUE, 60, 0.0)
    waiting = threading.Thread(target=large.take, args=(RED, 60, WAIT_S))
    waiting.start()
    large.give_back(RED, 60)
    waiting.join(WAIT_S)
    assert not waiting.is_alive()
    large.give_back(RED, 60)
    large.take(RED, 1000, 0.0)  # more than all may have, and alone


def test_a_write_whose_payload_does_not_come_takes_no_more_requests_of_its_tenant_in() -> None:
    announced = b"".join(encode_header(key, b"x") for key in keys(range(200)))
    with running_pool(limits=PoolLimits(max_large_bytes=30_000, max_stall_s=2.0)) as pool:
        red, blue = connect(pool.block[0]), connect(pool.block[0], "blue")
        address = Address.parse(pool.block[0])
        try:
            red.write(items(range(4)))
            assert red.lookup(keys(range(600))).count(Status.HIT) == 4
            with socket.create_connection((address.host, address.port), timeout=WAIT_S) as stalled:
                stalled.sendall(GOLDEN["hello"][0])
                receive_frame(stalled)
                stalled.sendall(encode_head({"id": 2, "verb": "write", "headers": announced}, 200))
                stalled.sendall(b"x")
                assert red.lookup(keys(range(4))).count(Status.HIT) == 4  # a small one
                until(lambda: red.lookup(keys(range(600))).count(Status.HIT) == 0)
                assert blue.lookup(keys(range(600), BLUE)) == [Status.MISS] * 600
            assert red.lookup(keys(range(600))).count(Status.HIT) == 4
        finally:
            red.close()
            blue.close()


def test_announced_blocks_take_little_more_than_their_headers() -> None:
    data = b"".join(encode_header(key, b"x" * (1 + i % 7)) for i, key in enumerate(keys(range(5000))))
    tracemalloc.start()
    try:
        blocks = AnnouncedBlocks(data)
        taken_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken_bytes < len(data) // 4
    assert blocks.sizes == [1 + i % 7 for i in range(5000)]
    assert (
        [header.key for header in blocks.headers(10, 13)]
        == keys(range(10, 13))
        == [blocks.key(i) for i in (10, 11, 12)]
    )
    assert blocks.namespaces() == {keys([0])[0][16:32]}


@pytest.mark.parametrize(("place", "byte"), [(0, 0xFF), (4, 9), (6, 99), (7, 1), (6, 1)])
def test_a_header_that_is_not_sound_is_refused_whatever_its_place(place: int, byte: int) -> None:
    data = bytearray(b"".join(encode_header(key, b"xy") for key in keys(range(50))))
    data[31 * HEADER_BYTES + place] = byte
    with pytest.raises(InvalidInputError, match="a block's header"):
        AnnouncedBlocks(bytes(data))
