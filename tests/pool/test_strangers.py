"""What the log says of peers that speak another protocol: where they are, in a line for many."""

import logging
import os
import socket
from pathlib import Path

import pytest

from block_rig import receive_rest
from clock_rig import StillClock
from kvtier.errors import InvalidInputError
from kvtier_pool.block.strangers import StrangerLog, name_of
from pool_rig import WAIT_S, running_pool
from tls_rig import Site

LOGGER = "kvtier_pool.block.strangers"


def test_a_line_for_many(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    clock = StillClock()
    log = StrangerLog(clock)
    for i in range(1000):
        log.note(f"10.0.0.1:{i}", InvalidInputError("what it said"))
    clock.now_s += 60
    log.note("10.0.0.2:1", InvalidInputError("what it said"))
    clock.now_s += 60
    log.note("10.0.0.3:1", InvalidInputError("what it said"))
    assert caplog.messages == [
        "connection from 10.0.0.1:0 refused: what it said",
        "connection from 10.0.0.2:1 refused: what it said; 999 others since the last such line",
        "connection from 10.0.0.3:1 refused: what it said",
    ]


@pytest.mark.parametrize("tls", [False, True])
def test_connections_of_strangers_leave_one_line_with_an_address(
    tmp_path: Path, tls: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with Site.build(tmp_path).pool() if tls else running_pool() as pool:
        host, _, port = pool.block[0].rpartition(":")
        names = []
        for _ in range(5):
            with socket.create_connection((host, int(port)), WAIT_S) as stranger:
                names.append("{}:{}".format(*stranger.getsockname()))
                stranger.sendall(b"what is this, a protocol?")
                receive_rest(stranger)
    (line,) = [message for message in caplog.messages if "refused" in message]
    assert line.startswith(f"connection from {names[0]} refused: ")


def test_names_of_peers() -> None:
    ours, theirs = socket.socketpair()
    assert name_of(ours) == f"a Unix socket, user {os.geteuid()}"
    for end in (ours, theirs):
        end.close()
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as lonely:
        assert name_of(lonely) == "a peer that is gone"
        with socket.create_connection(listening.getsockname()) as peer:
            assert name_of(peer) == "{}:{}".format(*listening.getsockname())
