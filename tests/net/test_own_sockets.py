"""TCP sockets of this process, as its descriptors show them."""

import os
import socket

import pytest

from kvtier.net.own_sockets import OwnSocket, OwnSockets
from pool_rig import until


def test_a_connection_is_found_and_ended_and_no_other_one() -> None:
    sockets = OwnSockets()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        here = listening.getsockname()
        with socket.create_connection(here) as client, socket.create_connection(here) as other:
            accepted, kept = (listening.accept()[0] for _ in range(2))
            with accepted, kept:
                found = sockets.look()
                assert found == {**found, **sockets.look()}, "the same, looked up or remembered"
                assert found[OwnSocket(here, None)] == listening.fileno()
                served = OwnSocket(here, client.getsockname())
                assert found[served] == accepted.fileno()
                client.sendall(b"not read")
                until(lambda: sockets.received_bytes(served, accepted.fileno()) == len(b"not read"))
                assert sockets.received_bytes(served, kept.fileno()) is None
                sockets.end(served, kept.fileno())  # its descriptor is another connection's by now
                kept.sendall(b"there")
                assert other.recv(10) == b"there"
                sockets.end(served, accepted.fileno())
                assert accepted.recv(10) == b"not read"
                assert client.recv(10) == b""
        assert OwnSocket(here, None) in sockets.look()
    assert OwnSocket(here, None) not in sockets.look()


def test_a_descriptor_that_is_another_files_by_now_costs_none() -> None:
    sockets, served = OwnSockets(), OwnSocket(("127.0.0.1", 1), ("127.0.0.1", 2))
    with open(os.devnull) as file:
        before = len(os.listdir("/proc/self/fd"))
        sockets.end(served, file.fileno())
        assert sockets.received_bytes(served, file.fileno()) is None
        assert len(os.listdir("/proc/self/fd")) == before


def test_an_ipv4_address_is_the_same_on_a_socket_for_both() -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listening:
        port = listening.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client, listening.accept()[0] as accepted:
            found = OwnSockets().look()
            assert found[OwnSocket(("127.0.0.1", port), client.getsockname())] == accepted.fileno()
            assert os.fstat(found[OwnSocket(("::", port), None)])
