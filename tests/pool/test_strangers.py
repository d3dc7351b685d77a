"""What the log says of peers that speak another protocol: where they are, in a line for many."""

import json
import logging
import os
import socket
import ssl
import urllib.request
from pathlib import Path

import pytest

from block_rig import receive_rest
from clock_rig import StillClock
from kvtier.errors import InvalidInputError
from kvtier_pool.strangers import StrangerLog, name_of
from pool_rig import WAIT_S, running_pool, until
from tls_rig import Site

COUNTER = "kvtier_pool_strangers_refused_total"
"""It has four samples: block and protocol, block and TLS, HTTP and protocol, HTTP and TLS."""
LOGGER = "kvtier_pool.strangers"


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


@pytest.mark.parametrize("with_tls", [True, False])
def test_peers_that_cannot_agree_on_tls_are_in_both_logs_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, with_tls: bool
) -> None:
    """At the block port and at the HTTP port: those without TLS, and those that do not trust the certificate."""
    caplog.set_level(logging.INFO)
    audit = str(tmp_path / "audit.jsonl")
    with Site.build(tmp_path).pool(audit_log=audit) if with_tls else running_pool(audit_log=audit) as pool:
        for address in (pool.block[0], pool.http):
            host, _, port = address.rpartition(":")
            with socket.create_connection((host, int(port)), WAIT_S) as plain:
                plain.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
                assert receive_rest(plain)
            with socket.create_connection((host, int(port)), WAIT_S) as distrustful, pytest.raises(ssl.SSLError):
                ssl.create_default_context().wrap_socket(distrustful, server_hostname=host)
        with socket.create_connection((host, int(port)), WAIT_S):
            pass  # a probe that asks no more than whether somebody listens
        url = f"{'https' if with_tls else 'http'}://{pool.http}/metrics"
        trusting = ssl._create_unverified_context() if with_tls else None

        def counted() -> list[float]:
            page = urllib.request.urlopen(url, timeout=WAIT_S, context=trusting).read().decode()
            return [float(line.split()[1]) for line in page.splitlines() if line.startswith(COUNTER)]

        until(lambda: counted() == ([1, 1, 1, 1] if with_tls else [2, 0, 1, 0]))
    lines = map(json.loads, Path(audit).read_text().splitlines())
    refused = [line for line in lines if line["event"] == "connection_refused"]
    assert all(line["address"].startswith("127.0.0.1:") for line in refused)
    # Connections are refused by threads and tasks of their own, so their lines may come in any order.
    reasons = {
        door: sorted(line["reason"] for line in refused if line["door"] == door and "repeated" not in line)
        for door in ("block", "http")
    }
    if with_tls:
        assert all(len(of_door) == 2 for of_door in reasons.values())
        for of_door in reasons.values():
            assert sum("does not accept this side's certificate" in reason for reason in of_door) == 1
        assert sum("HTTPS" in reason for reason in reasons["http"]) == 1
    else:
        assert [len(of_door) for of_door in reasons.values()] == [1, 1]
        assert [(line["door"], line["repeated"]) for line in refused if "repeated" in line] == [("block", 1)]
        assert "TLS at the pool's HTTP port" in reasons["http"][0]
    assert any("refused: " in message for message in caplog.messages)


def test_names_of_peers() -> None:
    ours, theirs = socket.socketpair()
    assert name_of(ours) == f"a Unix socket, user {os.geteuid()}"
    for end in (ours, theirs):
        end.close()
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as lonely:
        assert name_of(lonely) == "a peer that is gone"
        with socket.create_connection(listening.getsockname()) as peer:
            assert name_of(peer) == "{}:{}".format(*listening.getsockname())
