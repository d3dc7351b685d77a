"""HELLO: who the client is, and which namespaces it is going to use."""

import re
import socket
from collections.abc import Iterator

import pytest

from block_rig import HEADER, KEY, PAYLOAD, receive_frame, receive_rest, session, split_frames
from kvtier.errors import InvalidInputError
from kvtier.identity.keys import NamespaceId, split_store_key
from kvtier.protocol.block import encode_head
from kvtier.testing.contract import make_key, summed
from kvtier.tiers.base import Status, WriteStatus
from kvtier.tiers.pool.socket_transport import SocketTransport
from pool_rig import RED, TOKENS, WAIT_S, CoreRig, core_rig, running_pool

NAMED = split_store_key(KEY)[1]
OTHER = NamespaceId(b"another-unnamed!")


@pytest.fixture
def rig() -> Iterator[CoreRig]:
    with core_rig() as rig:
        yield rig


def hello(**changes: object) -> bytes:
    header = {"id": 1, "verb": "hello", "versions": [1], "token": TOKENS["red"], "client": "test"}
    return encode_head({name: value for name, value in (header | changes).items() if value is not ...})


def request(verb: str, payload_bytes: int = 0, **fields: object) -> bytes:
    return encode_head({"id": 2, "verb": verb, **fields}, payload_bytes)


def group(namespace: bytes) -> dict[str, object]:
    return {"namespace": namespace, "hashes": bytes(32), "payload_bytes": 1}


def refusal(rig: CoreRig, sent: bytes) -> tuple[str, str]:
    """Result and message of the last answer, after which the connection was closed."""
    with session(rig) as client:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        last = split_frames(receive_rest(client))[-1]
    return last.text("result"), last.text("message")


def test_named_namespaces_can_be_used(rig: CoreRig) -> None:
    many = [bytes([i]) * 16 for i in range(255)]
    with session(rig) as client:
        client.sendall(hello(namespaces=[*many, NAMED]))
        client.sendall(request("write", len(PAYLOAD), headers=HEADER) + PAYLOAD)
        client.sendall(request("lookup", groups=[group(NAMED), group(many[7])]) + request("usage"))
        answers = [receive_frame(client)[0] for _ in range(4)]
    assert [answer.text("result") for answer in answers] == ["ok"] * 4
    assert answers[1].data("statuses") == bytes([WriteStatus.STORED])


@pytest.mark.parametrize("named", [[], [NAMED]])
@pytest.mark.parametrize(
    "sent",
    [
        request("lookup", groups=[group(OTHER)]),
        request("lookup", groups=[group(NAMED), group(OTHER)]),
        request("read", groups=[group(OTHER)]),
        request("discard", groups=[group(OTHER)]),
    ],
)
def test_others_are_refused(rig: CoreRig, named: list[bytes], sent: bytes) -> None:
    result, message = refusal(rig, hello(namespaces=named) + sent)
    assert result == "invalid"
    assert "none of those that hello named" in message


def test_a_write_into_another_is_refused_before_its_payload(rig: CoreRig) -> None:
    result, message = refusal(rig, hello(namespaces=[OTHER]) + request("write", len(PAYLOAD), headers=HEADER))
    assert (result, NAMED.hex() in message) == ("invalid", True)
    assert rig.core.lookup([KEY]) == [Status.MISS]


@pytest.mark.parametrize(
    ("namespaces", "message"),
    [
        (None, "namespaces must be list"),
        (b"x" * 16, "namespaces must be list"),
        ([b"x" * 15], "ids of 16 bytes"),
        (["x" * 16], "must hold bytes"),
        ([[]], "must hold bytes"),
        ([bytes([i % 256]) * 16 for i in range(257)], "exceeds"),
        ([b"x" * 4000] * 3, "at most 8192"),
    ],
)
def test_malformed_lists_are_refused(rig: CoreRig, namespaces: object, message: str) -> None:
    result, said = refusal(rig, hello(namespaces=namespaces))
    assert result == "invalid"
    assert re.search(message, said)


@pytest.mark.parametrize(
    ("changes", "result", "message"),
    [
        ({"token": ...}, "unauthenticated", "no credentials"),
        ({"token": ""}, "unauthenticated", "shorter than 16 bytes"),
        ({"token": None}, "invalid", "token must be str"),
    ],
)
def test_without_a_certificate_the_token_is_needed(
    rig: CoreRig, changes: dict[str, object], result: str, message: str
) -> None:
    assert refusal(rig, hello(**changes))[0] == result
    assert message in refusal(rig, hello(**changes))[1]


def test_the_pool_holds_a_transport_to_what_it_was_given() -> None:
    with running_pool() as pool:
        transport = SocketTransport(pool.block[0], TOKENS["red"], RED, namespaces=[NAMED])
        assert transport.lookup([KEY], WAIT_S) == [Status.MISS]
        with pytest.raises(InvalidInputError, match="hello named"):
            transport.lookup([make_key("elsewhere", namespace=OTHER)], WAIT_S)
        assert transport.write([summed(KEY, PAYLOAD)], WAIT_S) == [WriteStatus.STORED]
        transport.close()
