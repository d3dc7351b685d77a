"""WRITE when some of its blocks are not stored: a status is true of its block, whatever else is in the request."""

from collections.abc import Iterator

import pytest

from block_rig import GOLDEN, HEADER, KEY, PAYLOAD, receive_frame, session
from kvtier.codec.stored_form import encode_header, header_from_checksum
from kvtier.errors import ClosedError, InvalidInputError
from kvtier.identity.keys import StoreKey, TenantId
from kvtier.protocol.block import Result, encode_head, error_for
from kvtier.testing.contract import make_key
from kvtier.tiers.base import Status, WriteStatus
from kvtier.tiers.host.slots import WriteSlot
from kvtier_pool.block.client_memory import ClientLimits, ClientMemory
from kvtier_pool.block.holdings import Holdings
from pool_rig import MIB, RED, CoreRig, core_rig

BROKEN = header_from_checksum(KEY, len(PAYLOAD), 1)
STORED, EXISTS, FAILED = WriteStatus.STORED, WriteStatus.EXISTS, WriteStatus.FAILED


@pytest.fixture
def rig() -> Iterator[CoreRig]:
    with core_rig() as rig:
        yield rig


def write(rig: CoreRig, headers: list[bytes], payload: bytes, **fields: object) -> list[WriteStatus]:
    with session(rig) as client:
        head = encode_head({"id": 2, "verb": "write", "headers": b"".join(headers), **fields}, len(payload))
        client.sendall(GOLDEN["hello"][0] + head + payload)
        receive_frame(client)
        answer = receive_frame(client)[0]
        if answer.text("result") != Result.OK:
            raise error_for(answer.text("result"), answer.text("message"))
        return answer.members("statuses", WriteStatus)


@pytest.mark.parametrize(
    ("headers", "statuses"),
    [
        ([BROKEN, HEADER], [FAILED, FAILED]),
        ([BROKEN, HEADER, BROKEN], [FAILED, FAILED, FAILED]),
        ([HEADER, BROKEN], [STORED, EXISTS]),
        ([HEADER, HEADER], [STORED, EXISTS]),
    ],
)
def test_a_block_exists_only_when_it_is_there(rig: CoreRig, headers: list[bytes], statuses: list[WriteStatus]) -> None:
    assert write(rig, headers, PAYLOAD * len(headers)) == statuses
    assert rig.core.lookup([KEY]) == [Status.HIT if STORED in statuses else Status.MISS]
    rig.core.discard([KEY])
    without = [header[:-8] + bytes(8) for header in headers]
    payload = b"".join(PAYLOAD + header[-8:] for header in headers)
    assert write(rig, without, payload, checksums_behind=1) == statuses, "behind the blocks they say the same"
    assert rig.load([KEY], len(PAYLOAD)) == [PAYLOAD if STORED in statuses else None]


def test_checksums_that_are_announced_have_to_come(rig: CoreRig) -> None:
    with pytest.raises(InvalidInputError, match="headers of 22 payload bytes before a payload of 14"):
        write(rig, [HEADER], PAYLOAD, checksums_behind=1)


def test_what_another_request_stored_exists_beside_a_broken_copy(rig: CoreRig) -> None:
    assert write(rig, [HEADER], PAYLOAD) == [STORED]
    assert write(rig, [BROKEN, HEADER], PAYLOAD * 2) == [EXISTS, EXISTS]


def test_a_block_of_no_bytes_fails_and_keeps_nobody_out(rig: CoreRig) -> None:
    assert write(rig, [encode_header(KEY, b""), HEADER], PAYLOAD) == [FAILED, STORED]
    assert rig.load([KEY], len(PAYLOAD)) == [PAYLOAD]


def test_a_block_of_no_bytes_cannot_be_prepared_either() -> None:
    with core_rig(shared=True) as rig:
        limits = ClientLimits(lease_s=10.0, max_held_bytes=MIB, max_prepared_s=60.0)
        memory = ClientMemory(rig.core, RED, 1, Holdings(lambda: None), limits, lambda: 0.0)
        assert memory.prepare([KEY], [0]) == (0, bytes([FAILED]), [])
        memory.close()


def test_a_prepare_that_fails_half_way_leaves_no_slots_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    with core_rig(shared=True) as rig:
        holdings = Holdings(lambda: None)
        limits = ClientLimits(lease_s=10.0, max_held_bytes=MIB, max_prepared_s=60.0)
        memory = ClientMemory(rig.core, RED, 1, holdings, limits, lambda: 0.0)
        keys = [make_key(i, tenant=RED) for i in range(3)]
        begin_write = rig.core.begin_write

        def end_at_the_last(tenant: TenantId, key: StoreKey, nbytes: int, writer: int) -> WriteSlot | WriteStatus:
            if key == keys[-1]:
                raise ClosedError("closed meanwhile")
            return begin_write(tenant, key, nbytes, writer)

        with monkeypatch.context() as patch:
            patch.setattr(rig.core, "begin_write", end_at_the_last)
            with pytest.raises(ClosedError):
                memory.prepare(keys, [4096] * 3)
        assert rig.core.lookup(keys) == [Status.MISS] * 3
        assert (memory.held_bytes, holdings.is_empty) == (0, True)
        write_id, statuses, _ = memory.prepare(keys, [4096] * 3)
        assert statuses == bytes([STORED] * 3)
        memory.abort(write_id)
        memory.close()
