"""The verbs of clients that map the pool's memory, as bytes on a Unix socket."""

import contextlib
import socket
import struct
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from prometheus_client import CollectorRegistry

from block_rig import GOLDEN, KEY, PAYLOAD, mutated, receive_frame, receive_rest, session, split_frames
from kvtier.codec.checksums import checksum
from kvtier.memory import memfd
from kvtier.memory.mapped_slab import MappedSlab
from kvtier.memory.slab_layout import SharedSlab, slab_bytes
from kvtier.protocol.block import encode_head
from kvtier.protocol.groups import group
from kvtier.protocol.shared_memory import PLACE
from kvtier.testing.contract import make_key
from kvtier.tiers.base import Status, WriteStatus
from kvtier.tiers.common.shares import Share
from kvtier.tiers.host.tier import BLOCK_OVERHEAD_BYTES
from kvtier_pool.block.client_memory import NOTHING_HELD, ClientLimits
from kvtier_pool.block.shared_memory import SharedClients
from kvtier_pool.limits import PoolLimits
from kvtier_pool.metrics import PoolMetrics
from pool_rig import BLUE, MIB, RED, CoreRig, core_rig, until

pytestmark = pytest.mark.skipif(not memfd.available(), reason="shared memory needs Linux")
HELLO = GOLDEN["hello"][0]
GROUPS = group([KEY], [len(PAYLOAD)]).fields
CHECKSUM = struct.pack("<Q", checksum(KEY, PAYLOAD))
PREPARE = encode_head({"id": 6, "verb": "prepare", "groups": GROUPS})
SLOT = 1 << 32
"""The first slot of the first slab."""
GOLDEN_SLOTS = 3584
GOLDEN_MEMORY_BYTES = 1024 * (slab_bytes(64, GOLDEN_SLOTS, shared=True) + GOLDEN_SLOTS * BLOCK_OVERHEAD_BYTES)
"""Memory of which a first slab of the smallest slots has as many. Nearly all of it is never taken."""


def request(verb: str, request_id: int = 7, **fields: object) -> bytes:
    return encode_head({"id": request_id, "verb": verb, **fields})


GOLDEN_SHARED: list[tuple[str, bytes, bytes]] = [
    (
        "hello",
        bytes.fromhex(
            "4b56544643000000000000000000000085a2696401a476657262a568656c6c6fa876657273696f6e739101a5746f6b656e"
            "b37265642d746f6b656e2d666f722d7465737473a6636c69656e74a66b7674696572"
        ),
        bytes.fromhex(
            "4b5654465c000000000000000000000087a2696401a6726573756c74a26f6ba876657273696f6e739101a776657273696f"
            "6e01a674656e616e74c410edffbbe14de80b6021870359901ff95ea86c656173655f6d73cd2710ae6d61785f68656c645f"
            "6279746573ce00100000"
        ),
    ),
    (
        "prepare",
        bytes.fromhex(
            "4b5654466f000000000000000000000083a2696402a476657262a770726570617265a667726f7570739183a96e616d6573"
            "70616365c4106e616d6573706163652d6e756d626572a6686173686573c420b9f5203fc6d1830b1a6f22021a18481651fd"
            "a291c44bd281ddc44181c31fe004ad7061796c6f61645f62797465730e"
        ),
        bytes.fromhex(
            "4b56544632000000000000000000000085a2696402a6726573756c74a26f6ba5777269746501a87374617475736573c401"
            "00a5736c6f7473c4080000000001000000"
        ),
    ),
    (
        "map",
        bytes.fromhex("4b56544614000000000000000000000083a2696403a476657262a36d6170a4736c616201"),
        bytes.fromhex(
            "4b56544632000000000000000000000085a2696403a6726573756c74a26f6ba96e756d5f736c6f7473cd0e00aa736c6f74"
            "5f627974657340a87772697461626c6501"
        ),
    ),
    (
        "commit",
        bytes.fromhex(
            "4b5654462c000000000000000000000084a2696404a476657262a6636f6d6d6974a5777269746501a9636865636b73756d"
            "73c40879912285405832df"
        ),
        bytes.fromhex("4b5654461b000000000000000000000083a2696404a6726573756c74a26f6ba87374617475736573c40100"),
    ),
    (
        "acquire",
        bytes.fromhex(
            "4b5654466f000000000000000000000083a2696405a476657262a761637175697265a667726f7570739183a96e616d6573"
            "70616365c4106e616d6573706163652d6e756d626572a6686173686573c420b9f5203fc6d1830b1a6f22021a18481651fd"
            "a291c44bd281ddc44181c31fe004ad7061796c6f61645f62797465730e"
        ),
        bytes.fromhex(
            "4b56544643000000000000000000000085a2696405a6726573756c74a26f6ba56c6561736502a87374617475736573c401"
            "01a6706c61636573c4180000000001000000010000000000000079912285405832df"
        ),
    ),
    (
        "release",
        bytes.fromhex("4b56544619000000000000000000000083a2696406a476657262a772656c65617365a56c6561736502"),
        b"",
    ),
    (
        "abort",
        bytes.fromhex("4b56544617000000000000000000000083a2696407a476657262a561626f7274a5777269746509"),
        b"",
    ),
    (
        "map_gone",
        bytes.fromhex("4b56544614000000000000000000000083a2696408a476657262a36d6170a4736c61624d"),
        bytes.fromhex("4b5654461a000000000000000000000083a2696408a6726573756c74a26f6ba96e756d5f736c6f747300"),
    ),
]
"""Verb, request and answer of one conversation, in order; verbs that give something back have no answer."""


@contextlib.contextmanager
def clients_of(rig: CoreRig, max_held_bytes: int = MIB) -> Iterator[SharedClients]:
    metrics = PoolMetrics(CollectorRegistry())
    limits = ClientLimits(lease_s=10.0, max_held_bytes=max_held_bytes, max_prepared_s=60.0)
    clients = SharedClients(rig.core, metrics, limits)
    clients.start()
    try:
        yield clients
    finally:
        clients.stop()


def test_golden_conversation() -> None:
    """What clients and pools of version 1 say to each other. Changing it takes a new version."""
    with core_rig(shared=True, memory_bytes=GOLDEN_MEMORY_BYTES) as rig, clients_of(rig) as clients:
        with session(rig, clients=clients) as client:
            converse(client)
        assert rig.core.lookup([KEY]) == [Status.HIT]
        assert not clients_hold(clients)


def converse(client: socket.socket) -> None:
    for verb, sent, expected in GOLDEN_SHARED:
        client.sendall(sent)
        received, descriptors, _, _ = socket.recv_fds(client, 1 << 16, 4) if expected else (b"", [], 0, "")
        assert received == expected, verb
        if verb == "map":
            (descriptor,) = descriptors
            slab = MappedSlab.map(SharedSlab(descriptor, writable=True, slot_bytes=64, num_slots=GOLDEN_SLOTS))
            slab.slot(SLOT, len(PAYLOAD))[:] = PAYLOAD
        else:
            assert not descriptors
    assert (slab.in_use, slab.generation(SLOT)) == (True, 1)


def clients_hold(clients: SharedClients) -> bool:
    return any(client.held_bytes for client in clients._snapshot())


@pytest.mark.parametrize(
    ("sent", "result", "message"),
    [
        (request("commit", write=1, checksums=b""), "invalid", "commit of 0 blocks of write 1"),
        (PREPARE + request("commit", write=1, checksums=bytes(16)), "invalid", "of 2 blocks"),
        (
            request("prepare", groups=GROUPS) + request("commit", write=1, checksums=bytes(9)),
            "invalid",
            "multiple of 8",
        ),
        (request("commit", write=-1, checksums=b""), "invalid", "write must be"),
        (request("acquire", groups=[GROUPS[0] | {"payload_bytes": 1 << 62}]), "limit_exceeded", "max_block_bytes"),
        (request("prepare", groups=[GROUPS[0] | {"hashes": bytes(32 * 101)}]), "limit_exceeded", "max_batch_blocks"),
        (request("map", slab="1"), "invalid", "slab must be"),
        (request("release"), "invalid", "lease must be"),
        (b"HEAD / HTTP/1.1\r\n\r\n", "invalid", "looks like HTTP"),
    ],
    ids=range(9),
)
def test_what_makes_no_sense_ends_the_connection_and_gives_everything_back(
    sent: bytes, result: str, message: str
) -> None:
    with core_rig(shared=True) as rig, clients_of(rig) as clients:
        with session(rig, PoolLimits(max_batch_blocks=100), clients) as client:
            client.sendall(HELLO + sent)
            last = split_frames(receive_rest(client))[-1]
        assert last.text("result") == result
        assert message in last.text("message")
        assert rig.core.lookup([KEY]) == [Status.MISS]
        assert not clients_hold(clients)


def test_only_unix_sockets_have_these_verbs() -> None:
    with core_rig(shared=True) as rig, session(rig) as client:
        client.sendall(HELLO + request("acquire", groups=GROUPS))
        greeting, _ = receive_frame(client)
        assert not greeting.has("lease_ms")
        assert "'acquire' is not known here" in split_frames(receive_rest(client))[-1].text("message")


def test_a_lease_ends_by_its_deadline_and_a_write_by_its_own() -> None:
    now_s = 100.0
    with core_rig(shared=True) as rig:
        metrics = PoolMetrics(CollectorRegistry())
        limits = ClientLimits(lease_s=5.0, max_held_bytes=MIB, max_prepared_s=60.0)
        clients = SharedClients(rig.core, metrics, limits, clock=lambda: now_s)
        client = clients.open(RED)
        rig.store("a")
        size = rig.core.usage(RED)[0].used_bytes
        lease, statuses, places = client.acquire([make_key("a"), make_key("b")], [size, size])
        assert (statuses, len(places)) == (bytes([Status.HIT, Status.MISS]), PLACE.size)
        write, _, slots = client.prepare([make_key("c")], [size])
        assert len(slots) == 1
        slab_bytes = client.held_bytes - size  # a miss holds nothing
        assert slab_bytes > size  # a slot that is held keeps its slab
        assert client.end_leases(104.0) == 0
        assert client.end_leases(105.0) == 1
        assert client.held_bytes == slab_bytes
        client.release(lease)  # too late, and no harm
        assert rig.core.lookup([make_key("c")]) == [Status.PENDING]
        client.commit(write, [1])
        assert rig.core.lookup([make_key("c")]) == [Status.HIT]
        write, _, slots = client.prepare([make_key("d"), make_key("e")], [size, size])
        assert len(slots) == 2
        assert (client.end_writes(159.0), client.end_writes(160.0)) == (0, 2)
        assert client.held_bytes == 0
        assert client.commit(write, [1, 1]) == [WriteStatus.FAILED] * 2
        assert rig.core.lookup([make_key("d"), make_key("c")]) == [Status.MISS, Status.HIT]
        clients.end(client)
        assert client.held_bytes == 0


def test_connections_of_a_tenant_hold_half_of_what_it_is_owed_together() -> None:
    size = 64 * 1024
    with core_rig(shared=True) as rig, clients_of(rig, 8 * MIB) as clients:
        one, other, blue = clients.open(RED), clients.open(RED), clients.open(BLUE)
        _, statuses, slots = one.prepare([make_key(i) for i in range(100)], [size] * 100)
        assert 3 * MIB < one.held_bytes <= 4 * MIB
        assert statuses == bytes([WriteStatus.STORED] * len(slots) + [WriteStatus.FAILED] * (100 - len(slots)))
        other.prepare([make_key(("other", i)) for i in range(100)], [size] * 100)
        assert one.held_bytes + other.held_bytes <= 4 * MIB
        assert blue.prepare([make_key("other", tenant=BLUE)], [size])[1] == bytes([WriteStatus.STORED])
        clients.end(one)
        before = other.held_bytes
        other.prepare([make_key(("more", i)) for i in range(20)], [size] * 20)
        assert other.held_bytes - before >= 20 * size
        for client in (other, blue):
            clients.end(client)


def test_what_misses_is_charged_to_nobody() -> None:
    size = 64 * 1024
    with core_rig(shared=True) as rig, clients_of(rig, 8 * MIB) as clients:
        client = clients.open(RED)
        rig.store("there")
        for i in range(10):
            missing = [make_key((i, j)) for j in range(50)]
            assert client.acquire([make_key("there"), *missing], [size] * 51)[0] != NOTHING_HELD
        assert client.held_bytes == 10 * size
        clients.end(client)


@pytest.mark.parametrize(("share", "expected"), [(Share(), 2 * MIB), (Share(cap_bytes=MIB), MIB // 2)])
def test_a_client_is_told_how_much_it_may_hold(share: Share, expected: int) -> None:
    """A client of a tenant that is owed little is told the bound of all the tenant's connections."""
    with core_rig(shared=True) as rig, clients_of(rig, 2 * MIB) as clients:
        rig.core.set_shares({RED: share}, {})
        with session(rig, clients=clients) as client:
            client.sendall(HELLO)
            greeting, _ = receive_frame(client)
            assert greeting.number("max_held_bytes") == expected


@pytest.mark.parametrize("verb", ["acquire", "prepare"])
def test_a_client_is_told_when_it_may_hold_more_or_less(verb: str) -> None:
    with core_rig(shared=True) as rig, clients_of(rig, 2 * MIB) as clients, session(rig, clients=clients) as client:
        client.sendall(HELLO)
        told = [receive_frame(client)[0].number("max_held_bytes")]
        for share in (Share(), Share(cap_bytes=MIB), Share(cap_bytes=MIB), Share()):
            rig.core.set_shares({RED: share}, {})
            client.sendall(request(verb, groups=GROUPS))
            answer, _ = receive_frame(client)
            told.append(answer.number("max_held_bytes") if answer.has("max_held_bytes") else 0)
        assert told == [2 * MIB, 0, MIB // 2, 0, 2 * MIB]


def test_a_block_under_a_lease_counts_for_its_tenant_however_small_it_is() -> None:
    with core_rig(shared=True) as rig, clients_of(rig, 8 * MIB) as clients:
        client = clients.open(RED)
        rig.store("a", nbytes=1)
        held = [client.acquire([make_key("a")] * 10_000, [1] * 10_000)[0] for _ in range(5)]
        assert [lease != 0 for lease in held] == [True] * 3 + [False] * 2
        clients.end(client)


@pytest.mark.parametrize("verb", ["write", "prepare"])
def test_a_block_of_no_bytes_is_refused(verb: str) -> None:
    with core_rig(shared=True) as rig:
        writer = 0 if verb == "write" else 1
        assert rig.core.begin_write(RED, make_key("a"), 0, writer) is WriteStatus.FAILED


def test_leases_end_also_after_a_time_without_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier_pool.block.shared_memory._TICK_S", 0.001)
    limits = ClientLimits(lease_s=0.0, max_held_bytes=MIB, max_prepared_s=0.0)
    with core_rig(shared=True) as rig:
        clients = SharedClients(rig.core, PoolMetrics(CollectorRegistry()), limits)
        clients.start()
        client = clients.open(RED)
        rig.store("a")
        size = rig.core.usage(RED)[0].used_bytes
        for number in range(3):
            assert client.acquire([make_key("a")], [size])[1] == bytes([Status.HIT])
            until(lambda: not client.held_bytes)
            assert client.prepare([make_key(number)], [size])[1] == bytes([WriteStatus.STORED])
            until(lambda: not client.held_bytes)
            assert clients.alive
        clients.end(client)
        clients.stop()
        assert not clients.alive


@pytest.fixture(scope="module")
def module_rig() -> Iterator[tuple[CoreRig, SharedClients]]:
    with core_rig(shared=True) as rig, clients_of(rig) as clients:
        yield rig, clients


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(sent=mutated(b"".join(sent for _, sent, _ in GOLDEN_SHARED), start=len(HELLO)))
def test_any_bytes_leave_nothing_held(module_rig: tuple[CoreRig, SharedClients], sent: bytes) -> None:
    rig, clients = module_rig
    with session(rig, PoolLimits(max_batch_blocks=100), clients) as client:
        with contextlib.suppress(ConnectionError):  # closed already
            client.sendall(sent)
            client.shutdown(socket.SHUT_WR)
        split_frames(receive_rest(client))
    assert not clients_hold(clients)
    assert rig.core.lookup([KEY]) != [Status.PENDING]
    rig.core.check()
    rig.core.discard([KEY])
