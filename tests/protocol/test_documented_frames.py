"""The examples of docs/wire-examples.md, and what docs/block-protocol.md says of frames, held with a pool."""

import contextlib
import socket
import struct
from collections.abc import Iterator

import msgpack
import pytest
from prometheus_client import CollectorRegistry

from block_rig import receive_exactly, receive_frame, receive_rest, session, split_frames
from document_rig import examples
from kvtier.codec.checksums import checksum
from kvtier.codec.stored_form import encode_header
from kvtier.identity.keys import StoreKey
from kvtier.memory import memfd
from kvtier.memory.mapped_slab import MappedSlab
from kvtier.memory.slab_layout import SharedSlab, words_of
from kvtier.protocol.block import encode_head
from kvtier.protocol.shared_memory import PLACE
from kvtier.testing.contract import make_key, make_payload
from kvtier.tiers.base import Status
from kvtier_pool.block.client_memory import ClientLimits
from kvtier_pool.block.shared_memory import SharedClients
from kvtier_pool.metrics import PoolMetrics
from pool_rig import MIB, RED, CoreRig, core_rig, until

PAGE = examples("wire-examples.md")
FORM = examples("stored-form.md")
KEY = StoreKey(FORM["store key"])
PAYLOAD = FORM["version 1, raw"][96:]
HELLO = PAGE["hello request"]
OVER_ANY = ["hello", "write", "lookup", "read"]
SHARED = ["prepare", "map", "commit", "acquire", "release", "abort"]
SLOT = 1 << 32


def fields_of(frame: bytes) -> dict[str, object]:
    """The header of a frame without payload, by its prelude and msgpack alone."""
    magic, header_bytes, payload_bytes = struct.unpack("<4sIQ", frame[:16])
    assert (magic, header_bytes, payload_bytes) == (b"KVTF", len(frame) - 16, 0)
    fields: dict[str, object] = msgpack.unpackb(frame[16:])
    return fields


@contextlib.contextmanager
def sharing(rig: CoreRig) -> Iterator[socket.socket]:
    limits = ClientLimits(lease_s=10.0, max_held_bytes=MIB, max_prepared_s=60.0)
    clients = SharedClients(rig.core, PoolMetrics(CollectorRegistry()), limits)
    with session(rig, clients=clients) as client:
        yield client


def test_the_conversation_over_any_connection() -> None:
    with core_rig() as rig, session(rig) as client:
        for verb in OVER_ANY:
            client.sendall(PAGE[f"{verb} request"])
            answer = PAGE[f"{verb} answer"]
            assert receive_exactly(client, len(answer)) == answer, verb
    assert FORM["version 1, raw"] == PAGE["write request"][-110:-14] + PAYLOAD


@pytest.mark.skipif(not memfd.available(), reason="shared memory needs Linux")
def test_the_conversation_in_shared_memory() -> None:
    with core_rig(shared=True) as rig, sharing(rig) as client:
        client.sendall(HELLO)
        assert receive_exactly(client, len(PAGE["shared hello answer"])) == PAGE["shared hello answer"]
        for verb in SHARED:
            client.sendall(PAGE[f"{verb} request"])
            expected = PAGE.get(f"{verb} answer")
            if expected is None:
                continue
            answer, descriptors, _, _ = socket.recv_fds(client, 1 << 16, 4)
            if verb != "map":
                assert (answer, descriptors) == (expected, []), verb
                continue
            told = fields_of(answer)
            # The number of slots is the pool's, and may change.
            assert told == fields_of(expected) | {"num_slots": told["num_slots"]}
            write_payload(descriptors[0], told)
        assert rig.load([KEY], len(PAYLOAD)) == [PAYLOAD]
        client.sendall(encode_head({"id": 8, "verb": "map", "slab": 77}))
        assert receive_frame(client)[0].number("id") == 8, "release and abort have no answer"


def write_payload(descriptor: int, told: dict[str, object]) -> None:
    num_slots, slot_bytes = told["num_slots"], told["slot_bytes"]
    assert isinstance(num_slots, int)
    assert isinstance(slot_bytes, int)
    slab = MappedSlab.map(SharedSlab(descriptor, writable=True, slot_bytes=slot_bytes, num_slots=num_slots))
    slab.slot(SLOT, len(PAYLOAD))[:] = PAYLOAD
    (place,) = PLACE.iter_unpack(fields_of(PAGE["acquire answer"])["places"])  # type: ignore[arg-type]
    assert place == (SLOT, slab.generation(SLOT), checksum(KEY, PAYLOAD))


def test_where_the_words_of_the_example_are() -> None:
    told = fields_of(PAGE["map answer"])
    words = words_of(told["num_slots"] * told["slot_bytes"], told["num_slots"])  # type: ignore[operator, arg-type]
    assert words.start == 229_376


def test_every_example_is_run() -> None:
    requests = {f"{verb} request" for verb in OVER_ANY + SHARED}
    answers = {f"{verb} answer" for verb in [*OVER_ANY, "shared hello", "prepare", "map", "commit", "acquire"]}
    assert set(PAGE) == requests | answers


def request(**fields: object) -> bytes:
    return encode_head({"id": 7, "verb": "usage", **fields})


@pytest.mark.parametrize(
    ("sent", "result"),
    [
        (request(unknown="x" * 4096), "ok"),
        (request(unknown="x" * 4097), "invalid"),
        (request(unknown=b"x" * 100_000), "ok"),
        (request(unknown=[0] * 256), "ok"),
        (request(unknown=[0] * 257), "invalid"),
        (request(unknown=dict.fromkeys(map(str, range(257)), 0)), "invalid"),
        (request(unknown=[[[]] * 200] * 5), "ok"),
        (request(unknown=[[[]] * 250] * 5), "invalid"),
        (request(unknown=msgpack.ExtType(5, b"x")), "invalid"),
        (request(unknown=msgpack.Timestamp(1)), "invalid"),
        (request(id=2**64 - 1), "ok"),
        (request(id=-1), "invalid"),
        (request(id=7.0), "invalid"),
        (request(verb=b"usage"), "invalid"),
        (encode_head({"id": 7, "verb": "release"}), "invalid"),
    ],
)
def test_limits_of_a_header(sent: bytes, result: str) -> None:
    with core_rig(shared=True) as rig, sharing(rig) as client:
        client.sendall(HELLO + sent)
        client.shutdown(socket.SHUT_WR)
        assert [answer.text("result") for answer in split_frames(receive_rest(client))] == ["ok", result]


def blocks_of(count: int, nbytes: int) -> tuple[list[StoreKey], bytes, bytes]:
    """Keys, the head of their `write`, its payload."""
    keys = [make_key(i, tenant=RED) for i in range(count)]
    payloads = [make_payload(i, nbytes) for i in range(count)]
    headers = b"".join(map(encode_header, keys, payloads))
    return keys, encode_head({"id": 2, "verb": "write", "headers": headers}, count * nbytes), b"".join(payloads)


@pytest.mark.parametrize(
    ("nbytes", "before", "after"),
    [
        (1000, [Status.PENDING, Status.PENDING, Status.PENDING], [Status.MISS, Status.MISS, Status.MISS]),
        (9 * MIB, [Status.HIT, Status.HIT, Status.PENDING], [Status.HIT, Status.HIT, Status.MISS]),
    ],
)
def test_blocks_become_visible_piece_by_piece(nbytes: int, before: list[Status], after: list[Status]) -> None:
    keys, head, payload = blocks_of(3, nbytes)
    with core_rig(memory_bytes=512 * MIB) as rig:
        with session(rig) as client:
            client.sendall(HELLO + head + payload[:-1])
            until(lambda: rig.core.lookup(keys) == before)
        assert rig.core.lookup(keys) == after
