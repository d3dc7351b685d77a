"""Ways to one Redis: Unix sockets, databases and TLS, with real servers."""

import re
import subprocess
from pathlib import Path

import pytest

from certificates import Authority
from free_port import free_port
from kvtier.metrics import Metrics
from kvtier.testing.contract import make_key, make_payload, read_blocks, summed
from kvtier.tiers.base import Status, WriteStatus
from redis_cluster_rig import BLOCK_BYTES, ITEMS, KEYS, NUM_BLOCKS, PAYLOADS
from redis_rig import (
    MIB,
    all_errors,
    connect,
    errors,
    running_redis,
    server_binary,
)


def test_a_unix_socket_and_a_database(tmp_path: Path) -> None:
    path = tmp_path / "redis.sock"
    with running_redis(tmp_path, "--unixsocket", str(path)) as server:
        tier, other = connect(f"unix://{path}?db=3"), connect(f"{server.url}/4")
        assert tier.write(ITEMS) == [WriteStatus.STORED] * NUM_BLOCKS
        assert read_blocks(tier, KEYS, BLOCK_BYTES) == PAYLOADS
        assert other.lookup(KEYS) == [Status.MISS] * NUM_BLOCKS
        assert [tier.usage().num_blocks, other.usage().num_blocks] == [NUM_BLOCKS, 0]
        for either in (tier, other):
            either.close()


def test_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("redis", "127.0.0.1")
    ca, cert, key = authority.certificate, pair.certificate, pair.key
    port = free_port()
    bare = subprocess.run([server_binary(), "--port", "0", "--tls-port", str(port)], capture_output=True, timeout=20)
    if re.search(rb"Bad directive|Failed finding TLS support", bare.stdout + bare.stderr):
        pytest.skip("this server was built without TLS")
    arguments = ["--tls-port", str(port), "--tls-cert-file", str(cert), "--tls-key-file", str(key)]
    with running_redis(tmp_path, *arguments, "--tls-ca-cert-file", str(ca), "--tls-auth-clients", "yes") as server:
        metrics = Metrics()
        url = f"rediss://127.0.0.1:{port}?ca={ca}&cert={cert}&key={key}"
        tier = connect(url, metrics=metrics)
        big = make_payload("big", 9 * MIB)
        assert tier.write([*ITEMS, summed(make_key("big"), big)]) == [WriteStatus.STORED] * (NUM_BLOCKS + 1)
        for _ in range(3):
            assert read_blocks(tier, KEYS, BLOCK_BYTES) == PAYLOADS
        assert read_blocks(tier, [make_key("big")], len(big)) == [big]
        assert all_errors(metrics) == []
        with server.stopped():
            hasty = connect(url, call_timeout_s=0.3)
            assert hasty.lookup(KEYS[:1]) == [Status.MISS]
            hasty.close()
        for stranger in (f"rediss://127.0.0.1:{port}", f"redis://127.0.0.1:{port}"):
            suspicious = connect(stranger, metrics=metrics)
            assert suspicious.lookup(KEYS[:1]) == [Status.MISS]
            suspicious.close()
        assert errors(metrics, "lookup", "UnavailableError") == 2
        tier.close()
