"""A pool whose certificate is renewed while it serves."""

import json
import socket
import ssl
from pathlib import Path

import pytest

from certificates import Authority
from kvtier.net.certificates import TlsFiles
from kvtier.net.tls import ClientTls
from kvtier.testing.contract import make_key
from kvtier.tiers.pool.tier import PoolTransport
from pool_rig import WAIT_S, running_pool
from tls_rig import transport


@pytest.mark.parametrize("scheme", ["block", "grpc", "http"])
def test_renewed_certificates_count_from_the_next_connection_on(tmp_path: Path, scheme: str) -> None:
    ca, successor = Authority(tmp_path), Authority(tmp_path, "successor")
    served = ca.issue("server", "127.0.0.1")
    context = ssl.create_default_context()
    for authority in (ca, successor):
        context.load_verify_locations(authority.certificate)
    with running_pool(tls=TlsFiles(certificate=served.certificate, key=served.key)) as pool:
        address = {"block": pool.block[0], "grpc": pool.grpc[0], "http": pool.http}[scheme]
        host, _, port = address.rpartition(":")

        def issuer() -> str:
            context.set_alpn_protocols(["h2"])
            with (
                socket.create_connection((host, int(port)), WAIT_S) as connection,
                context.wrap_socket(connection, server_hostname=host) as encrypted,
            ):
                return json.dumps(encrypted.getpeercert())

        def open_and_ask() -> PoolTransport | None:
            if scheme == "http":
                return None
            client = ClientTls(TlsFiles(ca=ca.certificate))
            old = transport(f"grpc:{address}" if scheme == "grpc" else address, client)
            old.lookup([make_key("x")], WAIT_S)
            return old

        old = open_and_ask()
        assert '"authority"' in issuer()
        old_key = served.key.read_bytes()
        successor.issue("server", "127.0.0.1")
        new_key = served.key.read_bytes()
        served.key.write_bytes(old_key)
        assert '"authority"' in issuer(), "the new key is not there yet"
        served.key.write_bytes(new_key)
        assert '"successor"' in issuer()
        successor.issue("server", "127.0.0.1", valid_days=-1)
        assert '"successor"' in issuer(), "what has expired replaces nothing"
        if old is not None:
            old.lookup([make_key("x")], WAIT_S)
            old.close()
