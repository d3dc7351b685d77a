"""Engines of one DNS name that come and go, and certificates that are renewed."""

import asyncio
import itertools
import json
import socket
import ssl
import threading
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client import CollectorRegistry

from cache_pool import WAIT_S, until
from certificates import Authority
from gateway_rig import KEYS, PlayedEngine, PlayedRequest, gateway_file, running_gateway
from kvtier.config.gateway import GatewayConfig, GatewayEngineConfig
from kvtier.net.certificates import TlsFiles
from kvtier_gateway.engines.engine import Engine
from kvtier_gateway.engines.fleet import Fleet
from kvtier_gateway.engines.gauges import described
from kvtier_gateway.engines.session import EngineSession
from kvtier_gateway.metrics import GatewayMetrics


def test_every_address_of_a_name_is_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that cannot be asked for keeps those from before, and holds up no change of the others."""
    addresses: list[str] = []
    hangs: list[bool] = []
    answers_again = threading.Event()
    real = socket.getaddrinfo

    def resolve(host: Any, port: Any, *rest: Any, **more: Any) -> Any:
        if host != "engines.example":
            return real(host, port, *rest, **more)
        if not addresses:
            if hangs:
                answers_again.wait(WAIT_S)
            raise socket.gaierror(socket.EAI_AGAIN, "the server does not answer")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in addresses]

    async def look(engine: PlayedEngine) -> None:
        named = f"dns+{engine.url.replace('127.0.0.1', 'engines.example')}"
        urls = [engine.url, engine.url.replace("127.0.0.1", "127.0.0.2")]
        config = GatewayConfig.model_validate(
            {"engines": [named], "probe_interval_s": 0.05, "resolve_interval_s": 0.05}
        )
        async with aiohttp.ClientSession() as session:
            fleet = Fleet(EngineSession(session), config, GatewayMetrics(CollectorRegistry()))

            async def until_named(*expected: str) -> None:
                async with asyncio.timeout(WAIT_S):
                    while [each.url for each in fleet.engines] != list(expected):
                        await asyncio.sleep(0.01)

            addresses[:] = ["127.0.0.1", "127.0.0.2", "127.0.0.1"]
            await fleet.start()
            assert [(each.url, each.server_name) for each in fleet.engines] == [
                (url, "engines.example") for url in urls
            ]
            # One accepts no connections: it is down, and the other one gets requests.
            assert [each.url for each in fleet.candidates("red", "tiny")] == urls[:1]
            addresses.clear()  # the name stops resolving: those from before stay, while others come and go
            other = "http://127.0.0.3:1"
            fleet.set(config.model_copy(update={"engines": [*config.engines, *_engines(other)]}))
            await until_named(*urls, other)
            assert [each.url for each in fleet.candidates("red", "tiny")] == urls[:1]
            hangs.append(True)
            more = _engines("http://127.0.0.3:2")
            fleet.set(config.model_copy(update={"engines": [*config.engines, *more], "probe_timeout_s": 0.5}))
            await until_named(*urls, more[0].url)
            answers_again.set()
            fleet.set(config)
            addresses[:] = ["127.0.0.1"]
            await until_named(urls[0])
            assert fleet.candidates("red", "tiny")
            await fleet.stop()

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with PlayedEngine() as engine:
        asyncio.run(look(engine))


def _engines(*urls: str) -> Any:
    return GatewayConfig.model_validate({"engines": urls}).engines


def test_an_engine_that_was_never_up_is_in_the_log_once_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    """A wrong URL, the wrong scheme and an unknown CA all look so."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hangs, refuses = f"http://127.0.0.1:{silent.getsockname()[1]}", "http://127.0.0.1:1"
        config = GatewayConfig(engines=_engines(hangs, refuses), probe_interval_s=0.05, probe_timeout_s=0.05)

        async def look() -> dict[str, Any]:
            async with aiohttp.ClientSession() as session:
                fleet = Fleet(EngineSession(session), config, GatewayMetrics(CollectorRegistry()))
                await fleet.start()
                async with asyncio.timeout(WAIT_S):
                    while any(engine.num_failures < 5 for engine in fleet.engines):
                        await asyncio.sleep(0.01)
                await fleet.stop()
                return {engine.url: described(engine, shows_tenants=False) for engine in fleet.engines}

        shown = asyncio.run(look())
    lines = [record.getMessage() for record in caplog.records if "is down" in record.getMessage()]
    assert sorted(lines) == sorted(
        f"engine {url} is down: {shown[url]['problem']}; it gets no requests until it answers" for url in shown
    )
    assert shown[hangs]["problem"] == "no answer in time"
    assert "Cannot connect to host 127.0.0.1:1" in shown[refuses]["problem"]


def test_a_name_that_no_dns_could_have_does_not_end_looking_for_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    async def look(engine: PlayedEngine) -> None:
        async with aiohttp.ClientSession() as session:
            config = GatewayConfig.model_validate({"engines": ["dns+http://a..b:80"]})
            fleet = Fleet(EngineSession(session), config, GatewayMetrics(CollectorRegistry()))
            await fleet.start()
            fleet.set(config.model_copy(update={"engines": [*config.engines, *_engines(engine.url)]}))
            async with asyncio.timeout(WAIT_S):
                while not fleet.candidates("red", None):
                    await asyncio.sleep(0.01)
            await fleet.stop()

    with PlayedEngine() as engine:
        asyncio.run(look(engine))


def test_a_gateway_takes_new_cas_of_its_engines_and_says_why_one_is_down_by_now(tmp_path: Path) -> None:
    old, new, unknown = (Authority(tmp_path, name) for name in ("old", "new", "unknown"))
    cas, serving = tmp_path / "cas.pem", ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)

    def certify(authority: Authority) -> None:
        pair = authority.issue("server", "127.0.0.1")
        serving.load_cert_chain(pair.certificate, pair.key)

    certify(old)
    cas.write_bytes(old.certificate.read_bytes())
    with PlayedEngine() as engine:
        # Each request has a connection of its own, so that each meets the certificate of its time.
        engine.RequestHandlerClass = type("Closing", (PlayedRequest,), {"protocol_version": "HTTP/1.0"})
        engine.socket = serving.wrap_socket(engine.socket, server_side=True)
        engine.url = engine.url.replace("http:", "https:")
        settings = f'engine_tls_ca = "{cas}"\n'
        config = gateway_file(tmp_path / "gateway.toml", [json.dumps(engine.url)], settings)
        with running_gateway(config) as gateway:
            gateway.until_up(engine.url)
            cas.write_bytes(old.certificate.read_bytes() + new.certificate.read_bytes())
            certify(new)
            gateway.says("renewed certificates are in use: ")
            until(lambda: gateway.ask("alice", prompt="x").status_code == 200, "the new CA counts")
            refused = (
                f"engine {engine.url} is down: Cannot connect to host {engine.url.removeprefix('https://')} [SSLCert"
            )
            num_before = gateway.log.count(refused)  # the gateway may have met the new certificate before the new CA
            certify(unknown)
            until(lambda: gateway.log.count(refused) > num_before, refused)
            engine.socket.close()
            gateway.says(f"engine {engine.url} is still down, for another reason: ")
            assert "<ssl" not in gateway.log


def test_a_look_at_cas_that_hangs_holds_up_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cas, hangs, answers_again = Authority(tmp_path).certificate, threading.Event(), threading.Event()
    looks = itertools.count()

    def look(path: Path) -> None:
        if next(looks):
            hangs.set()
            answers_again.wait(WAIT_S)

    monkeypatch.setattr("kvtier.net.certificates._stamp", look)

    async def ask(engine: PlayedEngine) -> None:
        async with aiohttp.ClientSession() as over:
            session = EngineSession(over, TlsFiles(ca=cas), look_s=0.01)
            try:
                until(hangs.is_set, "the file system hangs")
                async with await session.get(Engine(engine.url, GatewayEngineConfig(url=engine.url)), "/health") as got:
                    assert got.status == 200
            finally:
                session.close()
                answers_again.set()

    with PlayedEngine() as engine:
        asyncio.run(ask(engine))


def test_certificates_are_renewed_under_a_gateway_that_runs(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("server", "127.0.0.1")
    context = ssl.create_default_context(cafile=str(authority.certificate))
    files = f'tls_certificate = "{pair.certificate}"\ntls_key = "{pair.key}"\n'
    request = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEYS['alice']}\r\n"
        'Content-Length: 15\r\n\r\n{"prompt": "x"}'
    ).encode()
    with (
        PlayedEngine() as engine,
        running_gateway(gateway_file(tmp_path / "gateway.toml", [json.dumps(engine.url)], files)) as gateway,
    ):
        gateway.until_up(engine.url)
        host, port = gateway.url.removeprefix("https://").split(":")

        def connected() -> ssl.SSLSocket:
            raw = socket.create_connection((host, int(port)), WAIT_S)
            return context.wrap_socket(raw, server_hostname=host)

        def served() -> bytes | None:
            with connected() as raw:
                return raw.getpeercert(binary_form=True)

        with connected() as before:
            first = before.getpeercert(binary_form=True)
            for text in ("no certificate", authority.issue("server", "127.0.0.1").certificate.read_text()):
                pair.certificate.write_text(text)
                if text == "no certificate":
                    assert served() == first
            until(lambda: served() != first, "the renewed certificate is served")
            before.sendall(request)  # a connection from before goes on
            assert before.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        with socket.create_connection((host, int(port)), WAIT_S) as plain:
            plain.sendall(request)
            answer = b"".join(iter(lambda: plain.recv(1 << 16), b""))
            assert answer.startswith(b"HTTP/1.1 400 ")
            assert answer.endswith(b"this port speaks HTTPS: ask https://\n")
        assert len(engine.got) == 1
        assert "Traceback" not in gateway.log
        gateway.says("the certificates from before stay in use")
