"""TLS under the block protocol: a real pool, real certificates, and peers that have the wrong ones."""

import contextlib
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from block_rig import GOLDEN
from certificates import Pair
from kvtier.errors import ConfigError, KvtierError, UnauthenticatedError, UnavailableError
from kvtier.net.certificates import TlsFiles
from kvtier.net.tls import ClientTls
from kvtier.testing.contract import MakeTier, TierContract, make_key, make_payload, read_blocks, summed
from kvtier.tiers.base import Status, Tier, WriteStatus
from kvtier.tiers.pool.grpc_transport import GrpcTransport
from kvtier.tiers.pool.tier import PoolTransport
from pool_rig import BLOCK_BYTES, MIB, RED, TOKENS, WAIT_S, running_pool, until
from tls_rig import BLUE_NAME, RED_URI, Site, tier_over, transport

PAYLOAD = make_payload("payload", BLOCK_BYTES)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site.build(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def block(site: Site) -> Iterator[str]:
    """A pool with TLS, for tests that leave it as it is. Without pins, it greets as it did before there were any."""
    with site.pool(memory_bytes=64 * MIB, max_pin_s=0.0) as pool:
        yield pool.block[0]


@pytest.fixture(scope="module")
def mutual(site: Site) -> Iterator[dict[str, str]]:
    """Addresses, by protocol, of a pool that takes only clients with certificates."""
    with site.pool(mutual=True) as pool:
        yield {"block": pool.block[0], "grpc": f"grpc:{pool.grpc[0]}", "http": pool.http}


def ask(transport: PoolTransport) -> None:
    """One call, whose exception tells what is wrong with the connection."""
    try:
        assert transport.lookup([make_key("absent")], WAIT_S) == [Status.MISS]
    finally:
        transport.close()


def is_answered(transport: PoolTransport) -> bool:
    """False: it was not as fast as it should have been."""
    with contextlib.suppress(UnavailableError):
        ask(transport)
        return True
    return False


class TestContract(TierContract):
    tenants = (RED, RED)

    @pytest.fixture
    def make_tier(self, site: Site) -> Iterator[MakeTier]:
        with contextlib.ExitStack() as stack:

            def make(capacity_bytes: int) -> Tier:
                pool = stack.enter_context(site.pool(memory_bytes=capacity_bytes))
                tier = tier_over(transport(pool.block[0], site.client()))
                stack.callback(tier.close)
                return tier

            yield make


@pytest.mark.parametrize(("count", "nbytes"), [(1, 1), (3000, 100), (40, 3000), (3, 5 * MIB + 7)])
def test_blocks_of_any_size(block: str, site: Site, count: int, nbytes: int) -> None:
    """Smaller and larger than a record, fewer and more than a system call takes."""
    tier = tier_over(transport(block, site.client()))
    batch = [summed(make_key((nbytes, i)), make_payload((nbytes, i), nbytes)) for i in range(count)]
    assert tier.write(batch) == [WriteStatus.STORED] * count
    keys = [key for key, _, _ in batch]
    assert tier.lookup([*keys, make_key("absent")]) == [Status.HIT] * count + [Status.MISS]
    assert read_blocks(tier, keys, nbytes) == [payload for _, payload, _ in batch]
    tier.close()


def test_a_name_instead_of_an_address(block: str, site: Site) -> None:
    ask(transport(f"localhost:{block.rpartition(':')[2]}", site.client()))


def test_a_unix_socket_stays_as_it_is(tmp_path: Path, site: Site) -> None:
    """The pool's certificate says nothing about a file; and `tls_ca` may stand there for other addresses."""
    with site.pool(mutual=True, listen=(f"unix:{tmp_path}/pool.sock",)) as pool:
        ask(transport(pool.block[0], None))
        ask(transport(pool.block[0], site.client()))


@pytest.mark.parametrize("scheme", ["block", "grpc"])
class TestWhoTheClientIs:
    """Certificates and tokens to tenants, the same over both protocols."""

    def test_a_name_in_the_certificate_is_enough(self, mutual: dict[str, str], site: Site, scheme: str) -> None:
        red = tier_over(transport(mutual[scheme], site.client(site.ca.issue("red", RED_URI)), token=None))
        pair = site.ca.issue("blue", "other.example", BLUE_NAME)
        blue = tier_over(transport(mutual[scheme], site.client(pair), tenant="blue", token=None), "blue")
        key = make_key(scheme)
        assert red.write([summed(key, PAYLOAD)]) == [WriteStatus.STORED]
        assert read_blocks(red, [key], BLOCK_BYTES) == [PAYLOAD]
        assert blue.usage().num_blocks == 0
        red.close()
        blue.close()

    def test_a_token_of_the_same_tenant_does_no_harm(self, mutual: dict[str, str], site: Site, scheme: str) -> None:
        ask(transport(mutual[scheme], site.client(site.ca.issue("red", RED_URI))))

    def test_a_token_alone_counts_when_the_certificate_is_nobodys(
        self, mutual: dict[str, str], site: Site, scheme: str
    ) -> None:
        ask(transport(mutual[scheme], site.client(site.ca.issue("nobody", "nobody.example"))))

    @pytest.mark.parametrize(
        ("names", "token", "message"),
        [
            ([BLUE_NAME], TOKENS["red"], "more than one tenant"),
            ([RED_URI, BLUE_NAME], None, "more than one tenant"),
            (["nobody.example"], None, "certificate_names have any.*nobody.example"),
            ([], None, "no bearer token|authorization|no credentials"),
            ([RED_URI], "wrong-token-for-tests", "not known"),
            ([RED_URI + "/below", f"*.{BLUE_NAME}"], None, "certificate_names have any"),
            ([f"{BLUE_NAME}\0.stranger.example"], None, "certificate_names have any"),
            ([f"{RED_URI}\0.stranger.example"], None, "certificate_names have any"),
        ],
    )
    def test_credentials_that_do_not_hold(
        self, mutual: dict[str, str], site: Site, scheme: str, names: list[str], token: str | None, message: str
    ) -> None:
        pair = site.ca.issue("wrong", *names, common_name=RED_URI)
        with pytest.raises(UnauthenticatedError, match=message):
            ask(transport(mutual[scheme], site.client(pair), token=token))

    @pytest.mark.parametrize("which", ["none", "of a stranger", "expired"])
    def test_certificates_that_do_not_hold(self, mutual: dict[str, str], site: Site, scheme: str, which: str) -> None:
        """The token would be right; nobody gets as far as to show it."""
        pair = {
            "none": None,
            "of a stranger": site.stranger.issue("alien", RED_URI),
            "expired": site.ca.issue("old", RED_URI, valid_days=-1),
        }[which]
        with pytest.raises(KvtierError) as error:
            ask(transport(mutual[scheme], site.client(pair)))
        assert "tls_client_ca" in str(error.value)
        assert isinstance(error.value, UnauthenticatedError if scheme == "block" else UnavailableError)


@pytest.mark.parametrize(("names", "allowed"), [([RED_URI], True), (["nobody.example"], False)])
def test_reflection_goes_by_the_certificate_too(
    mutual: dict[str, str], site: Site, names: list[str], allowed: bool
) -> None:
    pair = site.ca.issue("curious", *names)
    parts = (path.read_bytes() for path in (site.ca.certificate, pair.key, pair.certificate))
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    with grpc.secure_channel(mutual["grpc"].removeprefix("grpc:"), grpc.ssl_channel_credentials(*parts)) as channel:
        answers = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([request]), timeout=WAIT_S
        )
        if allowed:
            assert "kvtier.pool.v1.Pool" in str(next(answers))
            return
        with pytest.raises(grpc.RpcError, match=r"nobody\.example"):
            next(answers)


@pytest.mark.parametrize("scheme", ["block", "grpc"])
class TestWhetherItIsThePool:
    """What the client checks, and what it says to do."""

    def refused(self, site: Site, scheme: str, client: ClientTls | None, server: Pair | None = None) -> str:
        with site.pool(server) as pool:
            address = pool.block[0] if scheme == "block" else f"grpc:{pool.grpc[0]}"
            with pytest.raises(UnavailableError) as error:
                ask(transport(address, client))
        return str(error.value)

    def test_an_unknown_ca(self, site: Site, scheme: str) -> None:
        assert "tls_ca" in self.refused(site, scheme, site.client(ca=site.stranger))

    def test_expired(self, site: Site, scheme: str) -> None:
        old = site.ca.issue("old-server", "127.0.0.1", valid_days=-1)
        assert "expired" in self.refused(site, scheme, site.client(), old)

    def test_another_name(self, site: Site, scheme: str) -> None:
        elsewhere = site.ca.issue("elsewhere", "pool.example", common_name="127.0.0.1")
        assert "tls_server_name" in self.refused(site, scheme, site.client(), elsewhere)

    def test_another_name_that_was_expected(self, site: Site, scheme: str) -> None:
        elsewhere = site.ca.issue("elsewhere", "pool.example")
        with site.pool(elsewhere) as pool:
            address = pool.block[0] if scheme == "block" else f"grpc:{pool.grpc[0]}"
            ask(transport(address, site.client(server_name="pool.example")))

    def test_no_tls_on_the_client(self, site: Site, scheme: str) -> None:
        with pytest.raises(KvtierError, match=r"set `tls_ca`|tls_ca set"), site.pool() as pool:
            ask(transport(pool.block[0] if scheme == "block" else f"grpc:{pool.grpc[0]}", None))

    def test_no_tls_on_the_pool(self, site: Site, scheme: str) -> None:
        with pytest.raises(UnavailableError, match=r"no TLS is spoken there.*tls_certificate"), running_pool() as pool:
            ask(transport(pool.block[0] if scheme == "block" else f"grpc:{pool.grpc[0]}", site.client()))


def test_strangers_at_a_port_with_tls_are_told_in_their_own_words(block: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(f"http://{block}/metrics", timeout=WAIT_S)
    assert b"`http_listen`" in error.value.read()
    with pytest.raises(UnavailableError, match="gRPC is at the address `grpc_listen`"):
        ask(GrpcTransport(block, TOKENS["red"]))


@pytest.mark.parametrize("sent", [b"\x16\x03\x01\x02\x00garbage" * 100, b"\x16" * 5, b"\x00", b"\xff" * 4096])
def test_garbage_ends_the_connection_and_nothing_else(block: str, site: Site, sent: bytes) -> None:
    host, _, port = block.rpartition(":")
    with socket.create_connection((host, int(port)), WAIT_S) as client:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            while client.recv(4096):
                pass
    ask(transport(block, site.client()))


@pytest.mark.parametrize("sent", [b"", b"\x16", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"])
def test_a_handshake_that_stalls_holds_nobody_up_and_is_cut_off(
    site: Site, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier_pool.block.session._HELLO_S", 0.3)
    with site.pool() as pool:
        host, _, port = pool.block[0].rpartition(":")
        with socket.create_connection((host, int(port)), WAIT_S) as stalled:
            stalled.sendall(sent)
            until(lambda: is_answered(transport(pool.block[0], site.client())))
            with contextlib.suppress(ConnectionResetError):
                assert stalled.recv(100) == b""


def test_a_server_that_never_shakes_hands_costs_a_deadline(site: Site) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        engine = transport(f"127.0.0.1:{server.getsockname()[1]}", site.client())
        with pytest.raises(UnavailableError, match="in time"):
            engine.lookup([make_key("x")], 0.2)
        engine.close()


def test_connections_beyond_the_limit_are_told_so(site: Site) -> None:
    with site.pool(max_connections=1) as pool:
        first = transport(pool.block[0], site.client())
        first.lookup([make_key("x")], WAIT_S)
        with pytest.raises(UnavailableError, match="max_connections: 1 of 2 are this tenant's"):
            ask(transport(pool.block[0], site.client()))
        second = transport(pool.block[0], site.client(), tenant="blue", token=TOKENS["blue"])
        second.lookup([make_key("x")], WAIT_S)
        with pytest.raises(UnavailableError, match="takes no more connections; see its max_connections"):
            ask(transport(pool.block[0], site.client()))
        first.close()
        second.close()


def test_a_stop_waits_for_nobody_who_is_idle(site: Site) -> None:
    with site.pool(shutdown_grace_s=1000.0) as pool:
        idle = transport(pool.block[0], site.client())
        idle.lookup([make_key("x")], WAIT_S)
    with pytest.raises(UnavailableError):
        idle.lookup([make_key("x")], WAIT_S)
    idle.close()


def test_health_and_metrics_over_https_without_a_certificate(mutual: dict[str, str], site: Site) -> None:
    """Probes have none."""
    context = ssl.create_default_context(cafile=str(site.ca.certificate))
    with urllib.request.urlopen(f"https://{mutual['http']}/healthz", timeout=WAIT_S, context=context) as answer:
        assert answer.read() == b"ok\n"
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(f"http://{mutual['http']}/healthz", timeout=WAIT_S)
    assert b"HTTPS" in error.value.read()


def test_a_renewed_client_certificate_counts_from_the_next_connection_on(mutual: dict[str, str], site: Site) -> None:
    pair = site.ca.issue("renewed", RED_URI, valid_days=-1)
    client = site.client(pair)
    with pytest.raises(UnauthenticatedError):
        ask(transport(mutual["block"], client, token=None))
    site.ca.issue("renewed", RED_URI)
    ask(transport(mutual["block"], client, token=None))


def test_version_1_2_still_does(block: str, site: Site) -> None:
    context = ssl.create_default_context(cafile=str(site.ca.certificate))
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    host, _, port = block.rpartition(":")
    with (
        socket.create_connection((host, int(port)), WAIT_S) as connection,
        context.wrap_socket(connection, server_hostname=host) as encrypted,
    ):
        request, answer = GOLDEN["hello"]
        encrypted.sendall(request)
        assert encrypted.recv(len(answer)) == answer


def test_a_server_that_cannot_read_its_files_does_not_start(site: Site) -> None:
    files = TlsFiles(certificate=site.server.certificate, key=site.ca.issue("another", "x.example").key)
    with pytest.raises(ConfigError, match=r"tls_key: .* is not the key of"), running_pool(tls=files):
        pass


def test_a_certificate_that_is_for_clients_alone_is_refused_at_the_start(site: Site) -> None:
    pair = site.ca.issue("client", "127.0.0.1", usages=[ExtendedKeyUsageOID.CLIENT_AUTH])
    files = TlsFiles(certificate=pair.certificate, key=pair.key, ca=site.ca.certificate)
    with pytest.raises(ConfigError, match=r"client\.pem is not for servers: .* serverAuth"), running_pool(tls=files):
        pass


def test_a_key_that_grpc_does_not_take_is_not_a_port_in_use(site: Site) -> None:
    odd = site.ca.issue("odd", "127.0.0.1", curve=ec.SECP256K1())
    with pytest.raises(ConfigError, match="gRPC takes P-256"), site.pool(odd):
        pass
    with site.pool() as pool, pytest.raises(ConfigError, match="in use"), site.pool(grpc_listen=pool.grpc):
        pass


def test_several_addresses(site: Site) -> None:
    free = ("127.0.0.1:0",) * 2
    with site.pool(listen=free, grpc_listen=free) as pool:
        for address in (*pool.block, *(f"grpc:{address}" for address in pool.grpc)):
            ask(transport(address, site.client()))


def test_the_containers_health_check_finds_out_that_it_must_speak_tls(mutual: dict[str, str]) -> None:
    check = [sys.executable, str(Path(__file__).parents[2] / "deploy" / "health.py")]
    answer = subprocess.run([*check, mutual["http"].rpartition(":")[2]], capture_output=True, text=True, timeout=WAIT_S)
    assert (answer.returncode, answer.stdout) == (0, "ok\n")
    assert subprocess.run([*check, "1"], capture_output=True, timeout=WAIT_S).returncode == 1
