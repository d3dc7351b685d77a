"""What is wrong with certificates, keys and their configuration, said before anything is served."""

import contextlib
import logging
import os
import re
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import ExtendedKeyUsageOID

from certificates import Authority
from kvtier.config import Config, parse_config
from kvtier.config.accepted import accepted_certificates, accepted_tokens
from kvtier.config.certificate_findings import ending_certificate
from kvtier.config.tls_files import gateway_engine_tls, pool_service_tls, pool_tls
from kvtier.errors import ConfigError
from kvtier.identity.keys import tenant_id
from kvtier.net.certificates import Renewed, TlsFiles, client_context, read_pem, server_context
from kvtier.net.tls import ClientTls, client_tls, server_tls
from kvtier.tiers.pool.grpc_transport import GrpcTransport
from kvtier.tiers.pool.socket_transport import SocketTransport
from pool_rig import TENANTS, TOKENS, running_pool

DIGEST = next(iter(TENANTS))


def parse(folder: Path, **tables: Any) -> Config:
    return parse_config({"tenant": "red", "tenants": {"red": {}}} | tables, source="k.toml", folder=folder, environ={})


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    service = {"tls_certificate": "pool.pem", "tls_key": "/etc/pool.key", "tls_client_ca": "ca.pem"}
    engine = {"tls_certificate": "e.pem", "tls_key": "e.key", "tls_ca": "ca.pem", "tls_server_name": "pool"}
    config = parse(tmp_path, pool_service=service, pool=engine)
    assert pool_service_tls(config) == TlsFiles(
        certificate=tmp_path / "pool.pem", key=Path("/etc/pool.key"), ca=tmp_path / "ca.pem"
    )
    assert pool_tls(config) == TlsFiles(certificate=tmp_path / "e.pem", key=tmp_path / "e.key", ca=tmp_path / "ca.pem")
    assert pool_tls(parse(tmp_path)) is pool_service_tls(parse(tmp_path)) is None


def test_a_certificate_stands_for_the_token(tmp_path: Path) -> None:
    engine = {"tls_certificate": "e.pem", "tls_key": "e.key", "tls_ca": "ca.pem"}
    assert parse(tmp_path, pool=engine).pool_token("red") is None
    with pytest.raises(ConfigError, match=r"tenants\.red\.token"):
        parse(tmp_path, pool={"tls_ca": "ca.pem"}).pool_token("red")


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        ({"tls_certificate": "e.pem", "tls_key": "e.key"}, "pool.tls_certificate: needs tls_ca"),
        ({"tls_key": "e.key"}, "pool.tls_key: needs tls_ca"),
        ({"tls_server_name": "pool"}, "pool.tls_server_name: needs tls_ca"),
        ({"tls_ca": "ca.pem", "tls_key": "e.key"}, r"k\.toml: pool\.tls_key: needs tls_certificate, too"),
        ({"tls_ca": "ca.pem", "tls_certificate": "e.pem"}, r"pool\.tls_certificate: needs tls_key, too"),
    ],
)
def test_an_engine_s_half_of_a_configuration(tmp_path: Path, pool: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pool_tls(parse(tmp_path, pool=pool))


@pytest.mark.parametrize("address", ["pool.example:7600", "10.0.0.7:7600", "[2001:db8::1]:7600", "grpc:0.0.0.0:7601"])
def test_no_engine_sends_its_token_over_a_network_in_the_clear(address: str) -> None:
    """Not even as its second way, which it takes when the Unix socket cannot be had."""
    ways = ["unix:/run/kvtier/pool.sock", "127.0.0.1:7600", "grpc:[::1]:7601", "localhost:7600"]
    assert pool_tls(parse_config({"pool": {"address": ways}}, source="x", environ={})) is None
    exposed = {"address": [*ways, address]}
    config = parse_config({"pool": exposed}, source="x", environ={})
    with pytest.raises(ConfigError, match=re.escape(f"to {address} in the clear")):
        pool_tls(config)
    for allowed in ({"insecure": True}, {"tls_ca": "ca.pem"}):
        pool_tls(parse_config({"pool": exposed | allowed}, source="x", environ={}))


@pytest.mark.parametrize(
    ("service", "tenant", "message"),
    [
        ({"tls_certificate": "p.pem"}, {}, r"pool_service\.tls_certificate: needs tls_key, too"),
        ({"tls_client_ca": "ca.pem"}, {}, "pool_service.tls_client_ca: .* set tls_certificate and tls_key"),
        (
            {},
            {"certificate_names": ["a.example"]},
            "red.certificate_names: .* without pool_service.tls_client_ca",
        ),
        (
            {"tls_certificate": "p.pem", "tls_key": "p.key"},
            {"certificate_names": ["a.example"]},
            "red.certificate_names: .* without pool_service.tls_client_ca",
        ),
        (
            {"tls_certificate": "p.pem", "tls_key": "p.key", "tls_client_ca": "ca.pem"},
            {"certificate_names": ["*.example"]},
            r"red.certificate_names: '\*\.example' matches no certificate",
        ),
    ],
)
def test_a_pool_s_half_of_a_configuration(
    tmp_path: Path, service: dict[str, str], tenant: dict[str, Any], message: str
) -> None:
    tenants = {"red": {"token_sha256": [DIGEST]} | tenant}
    config = parse(tmp_path, pool_service=service, tenants=tenants)
    with pytest.raises(ConfigError, match=message):
        (pool_service_tls(config), accepted_certificates(config))


def test_names_in_certificates_are_one_tenant_s(tmp_path: Path) -> None:
    tenants = {"red": {"certificate_names": ["a.example", "spiffe://a"]}, "blue": {"certificate_names": ["b.example"]}}
    service = {"tls_client_ca": "ca.pem"}
    config = parse(tmp_path, tenants=tenants, pool_service=service)
    assert accepted_certificates(config) == {"a.example": "red", "spiffe://a": "red", "b.example": "blue"}
    assert [token.name for token in accepted_tokens(config)] == [], "nobody needs one"
    tenants["blue"]["certificate_names"].append("a.example")
    with pytest.raises(ConfigError, match=r"'a\.example' is also of tenant 'red'"):
        accepted_certificates(parse(tmp_path, tenants=tenants, pool_service=service))


def encrypted(pem: bytes) -> bytes:
    key = serialization.load_pem_private_key(pem, None)
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"password"),
    )


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("missing certificate", "tls_certificate: cannot read .*pool.pem: No such file"),
        ("missing key", "tls_key: cannot read .*pool.key: No such file"),
        ("missing ca", "tls_(client_)?ca: cannot read .*authority.pem: No such file"),
        ("another key", "tls_key: .*pool.key is not the key of .*pool.pem"),
        ("encrypted key", "pool.key is encrypted"),
        ("no certificate", "pool.pem or .*pool.key is not PEM"),
        ("no key", "pool.pem or .*pool.key is not PEM"),
        ("no ca", "tls_(client_)?ca: .*authority.pem holds no CA certificate"),
        ("FIFO certificate", "pool.pem is no file"),
        ("FIFO key", "pool.key is no file"),
        ("FIFO ca", "authority.pem is no file"),
    ],
)
def test_files_that_are_no_good_are_named(tmp_path: Path, broken: str, message: str) -> None:
    ca = Authority(tmp_path)
    pair = ca.issue("pool", "127.0.0.1")
    another = ca.issue("another", "127.0.0.1")
    how, _, which = broken.partition(" ")
    path = {"certificate": pair.certificate, "key": pair.key, "ca": ca.certificate}[which]
    if how in ("missing", "FIFO"):
        path.unlink()
        if how == "FIFO":
            os.mkfifo(path)
    else:
        content = {"another": another.key.read_bytes(), "encrypted": encrypted(pair.key.read_bytes()), "no": b"none\n"}
        path.write_bytes(content[how])
    files = TlsFiles(certificate=pair.certificate, key=pair.key, ca=ca.certificate)
    for make in (server_context, client_context):
        with pytest.raises(ConfigError, match=message):
            make(files)
    with pytest.raises(ConfigError, match=message), running_pool(tls=files):
        pass
    with pytest.raises(ConfigError, match=message):
        GrpcTransport("127.0.0.1:1", TOKENS["red"], tls=ClientTls(files))


def test_errors_name_the_key_of_a_file_and_where_it_stands(tmp_path: Path) -> None:
    """An operator with three tables of TLS files looks for the one that is wrong."""
    pool = {"tls_ca": "none.pem"}
    with pytest.raises(ConfigError, match=r"^k\.toml: pool\.tls_ca: cannot read .*none\.pem: No such file"):
        client_tls(pool_tls(parse(tmp_path, pool=pool)), None)
    service = {"tls_certificate": "p.pem", "tls_key": "p.key", "tls_client_ca": "none.pem"}
    pair = Authority(tmp_path).issue("p", "127.0.0.1")
    assert pair.certificate == tmp_path / "p.pem"
    with pytest.raises(ConfigError, match=r"^k\.toml: pool_service\.tls_client_ca: cannot read .*none\.pem"):
        server_tls(pool_service_tls(parse(tmp_path, pool_service=service)))
    with pytest.raises(ConfigError, match=r"^k\.toml: gateway\.engine_tls_ca: cannot read .*none\.pem"):
        client_tls(gateway_engine_tls(parse(tmp_path, gateway={"engine_tls_ca": "none.pem"})), None)


def test_a_certificate_that_is_for_servers_alone_is_refused_by_an_engine_s_start(tmp_path: Path) -> None:
    """A pool with `tls_client_ca` would refuse every connection, and the engine would go on without a cache."""
    ca = Authority(tmp_path)
    for usage, is_refused in ((ExtendedKeyUsageOID.SERVER_AUTH, True), (ExtendedKeyUsageOID.CLIENT_AUTH, False)):
        pair = ca.issue("engine", "spiffe://site.example/red", usages=[usage])
        files = TlsFiles(certificate=pair.certificate, key=pair.key, ca=ca.certificate)
        refusal = pytest.raises(ConfigError, match=r"engine\.pem is not for clients: .* clientAuth")
        with refusal if is_refused else contextlib.nullcontext():
            ClientTls(files).check()


def test_what_was_made_last_stays_until_the_files_can_be_used(tmp_path: Path) -> None:
    path = tmp_path / "file"
    renewed = Renewed([("tls_key", path)], lambda: int(read_pem(("tls_key", path))))
    with pytest.raises(ConfigError, match="cannot read"):
        renewed.current()
    path.write_text("1")
    assert renewed.current() == 1
    path.unlink()
    assert renewed.current() == 1
    os.mkfifo(path)
    assert renewed.current() == 1, "nobody waits for a writer"
    path.unlink()
    path.write_text("22")
    assert renewed.current() == 22


def test_what_renewed_files_must_hold(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A certificate of today; of CAs one, beside which there may be those of before. Each problem is told at once."""
    caplog.set_level(logging.INFO)
    old, new = Authority(tmp_path, "old", valid_days=-1), Authority(tmp_path, "new")
    pair = new.issue("pool", "127.0.0.1")
    files = TlsFiles(certificate=pair.certificate, key=pair.key, ca=tmp_path / "cas.pem")
    assert files.ca is not None
    files.ca.write_bytes(new.certificate.read_bytes())
    renewed = Renewed(files.named, lambda: server_context(files))
    first = renewed.current()
    for cas in ((old, new), (new, old)):
        files.ca.write_bytes(b"".join(each.certificate.read_bytes() for each in cas))
        assert renewed.current() is not first
        first = renewed.current()
        assert all("expired" not in finding.text for finding in ending_certificate("pool.tls_ca", files.ca))
    assert caplog.text.count("renewed certificates are in use: ") == 2
    new.issue("pool", "127.0.0.1", from_days=1, valid_days=2)
    assert renewed.current() is first
    new.issue("pool", "127.0.0.1", valid_days=-1)
    assert renewed.current() is first
    files.ca.write_bytes(old.certificate.read_bytes())
    new.issue("pool", "127.0.0.1")
    assert renewed.current() is first
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [text.split("; ")[0].split(" 2")[0].replace(str(tmp_path), "") for text in told] == [
        "the certificates from before stay in use: tls_certificate: /pool.pem holds from",
        "the certificates from before stay in use: tls_certificate: /pool.pem expired at",
        "the certificates from before stay in use: tls_ca: /cas.pem expired at",
    ]


CERTIFIED = TlsFiles(certificate=Path("e.pem"), key=Path("e.key"), ca=Path("ca.pem"))


@pytest.mark.parametrize(
    ("address", "tls"),
    [
        ("127.0.0.1:1", None),
        ("127.0.0.1:1", ClientTls(TlsFiles(ca=Path("ca.pem")))),
        ("unix:/pool.sock", ClientTls(CERTIFIED)),
    ],
)
def test_a_client_needs_a_token_or_a_certificate(address: str, tls: ClientTls | None) -> None:
    with pytest.raises(ConfigError, match="only over TLS can a certificate"):
        SocketTransport(address, None, tenant_id("red"), tls=tls)
    with pytest.raises(ConfigError, match="only over TLS can a certificate"):
        GrpcTransport(address, None, tls=tls)
