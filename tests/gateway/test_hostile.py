"""Clients and engines that speak HTTP as nobody should, and keys that change under a request."""

import contextlib
import hashlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cache_pool import WAIT_S, until
from gateway_rig import KEYS, Gateway, PlayedEngine, PlayedRequest, gateway_file, running_gateway

SETTINGS = "probe_timeout_s = 60\nmax_connections = 3\nshutdown_grace_s = 0"
BODY = b'{"prompt": "a very secret prompt"}'


class Site:
    """A gateway for three connections at a time, before one engine."""

    def __init__(self, config: Path, engine: PlayedEngine, gateway: Gateway) -> None:
        self.config, self.engine, self.gateway = config, engine, gateway

    @contextlib.contextmanager
    def connection(self) -> Iterator[socket.socket]:
        """A client's."""
        host, port = self.gateway.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), WAIT_S) as raw:
            yield raw

    def answer(self, *headers: str, body: bytes = BODY) -> bytes:
        """The whole answer to a request with these headers."""
        with self.connection() as raw:
            raw.sendall(request(*headers, "Connection: close", body=body))
            return until_end(raw)


def request(*headers: str, body: bytes = BODY) -> bytes:
    head = ["POST /v1/completions HTTP/1.1", "Host: x", f"Authorization: Bearer {KEYS['alice']}", *headers]
    if not any(header.startswith("Transfer-Encoding") for header in headers):
        head.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*head, "", ""]).encode("latin-1") + body


def until_end(raw: socket.socket) -> bytes:
    return b"".join(iter(lambda: raw.recv(1 << 16), b""))


def read_answer(raw: socket.socket) -> bytes:
    """One answer, which has a length."""
    found = b""
    while b'"choices"' not in found:
        found += raw.recv(1 << 16)
    return found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    config = tmp_path_factory.mktemp("site") / "gateway.toml"
    with PlayedEngine() as engine:
        gateway_file(config, [json.dumps(engine.url)], SETTINGS, top='[log]\nlevel = "debug"')
        with running_gateway(config) as gateway:
            gateway.until_up(engine.url)
            yield Site(config, engine, gateway)


def test_a_body_comes_when_its_client_was_told_to_send_it(site: Site) -> None:
    with site.connection() as raw:
        raw.sendall(request("Expect: 100-continue").removesuffix(BODY))
        assert raw.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        raw.sendall(BODY)
        assert read_answer(raw).startswith(b"HTTP/1.1 200 ")
    assert site.answer("Expect: the unexpected").startswith(b"HTTP/1.1 417 ")


def test_a_body_is_packed_in_no_way(site: Site) -> None:
    chunked = b"%x;a=b\r\n%s\r\n0\r\nAuthorization: Bearer x\r\n\r\n" % (len(BODY), BODY)
    assert site.answer("Transfer-Encoding: chunked", body=chunked).startswith(b"HTTP/1.1 200 ")
    assert site.answer("Transfer-Encoding: gzip, chunked", body=chunked).startswith(b"HTTP/1.1 415 ")
    assert site.answer("Content-Encoding: identity", "Content-Encoding: gzip").startswith(b"HTTP/1.1 415 ")


def test_a_client_that_speaks_tls_to_a_port_of_http_is_in_the_log(site: Site) -> None:
    with site.connection() as raw:
        raw.sendall(b"\x16\x03\x01\x02\x00 and the rest of a ClientHello\r\n\r\n")
        assert b" 400 Bad Request" in until_end(raw)
    site.gateway.says("a client speaks TLS to a port of HTTP: have it ask http://, or set tls_certificate here")


def test_an_odd_answer_of_an_engine_is_one_of_the_gateway(site: Site) -> None:
    gateway, before = site.gateway, site.engine.answer

    def answer(head: str) -> bytes:
        def play(played: PlayedRequest) -> None:
            played.close_connection = True
            played.wfile.write(f"HTTP/1.1 {head}\r\n\r\n{{}}".encode("latin-1"))

        site.engine.answer = play
        return site.answer()

    try:
        secret = "Set-Cookie: a=b\r\nServer: s/1\r\nX-Internal: 10.0.0.1"
        given = answer(f"200 OK\r\n{secret}\r\nContent-Encoding: br\r\nContent-Length: 2")
        assert b"Content-Encoding: br" in given
        assert not any(line.encode() in given for line in secret.split("\r\n"))
        assert answer("200 OK\r\nContent-Type: a\x0bb\r\nContent-Length: 2").startswith(b"HTTP/1.1 200 ")
        for head in (
            "101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: upgrade", "099 Odd\r\nContent-Length: 2",
            "600 Odd\r\nContent-Length: 2", "200 OK\r\nContent-Length: 2\r\nContent-Length: 3",
            "200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked", "204 No Content\r\nContent-Length: 2",
        ):  # fmt: skip
            assert answer(head).startswith(b"HTTP/1.1 503 "), head
        with site.connection() as raw:  # what the engine sends of itself is no error inside the gateway
            raw.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert b"aiohttp" not in until_end(raw)
    finally:
        site.engine.answer = before
    assert "Traceback" not in gateway.log


def test_the_connection_that_is_cut_is_the_one_that_was_idle_for_longest(site: Site) -> None:
    with site.connection() as first, site.connection() as second, site.connection() as third:
        for raw in (third, second, first):
            raw.sendall(request())
            read_answer(raw)
        with site.connection() as fourth:
            fourth.sendall(request())
            assert read_answer(fourth).startswith(b"HTTP/1.1 200 ")
        assert third.recv(1) == b""
        first.sendall(request())
        assert read_answer(first).startswith(b"HTTP/1.1 200 ")


def test_an_engine_that_does_not_keep_tenants_apart_gets_no_requests(site: Site) -> None:
    gateway, page = site.gateway, site.engine.page
    site.engine.page = "vllm:num_requests_running 0.0\nvllm:kvtier_tier_blocks 1.0\nkvtier_build_info 1.0\n"
    until(lambda: gateway.engines()[site.engine.url]["fenced"], "the engine is fenced off")
    assert site.answer().startswith(b"HTTP/1.1 503 ")
    assert [ask(f"{gateway.status}/healthz").status_code for ask in (httpx.get, httpx.head)] == [503, 503]
    assert gateway.metric("kvtier_gateway_engine_fenced") == 1
    gateway.says(f"engine {site.engine.url} gets no requests: its /metrics does not show that kvtier runs there")
    for fields in ('isolation = "cache_salt"', 'tenants = ["red"]'):
        gateway_file(site.config, [f'{{url = "{site.engine.url}", {fields}}}'], SETTINGS)
        gateway.service.process.send_signal(1)
        until(lambda: not gateway.engines()[site.engine.url]["fenced"], fields)
        assert site.answer().startswith(b"HTTP/1.1 200 ")
    for name in ("healthz", "metrics"):
        probed = httpx.head(f"{gateway.status}/{name}")
        assert (probed.status_code, probed.content, int(probed.headers["Content-Length"]) > 0) == (200, b"", True)
    site.engine.page = page
    gateway_file(site.config, [json.dumps(site.engine.url)], SETTINGS)
    gateway.service.process.send_signal(1)

    def is_as_before() -> bool:
        listed = gateway.engines()[site.engine.url]
        return listed["tenants"] is None and not listed["fenced"]

    until(is_as_before, "the engine gets requests of all tenants again")


def test_a_stream_goes_on_while_its_engine_drains_and_leaves_and_its_key_is_taken_away(site: Site) -> None:
    gateway, url, go_on = site.gateway, site.engine.url, threading.Semaphore(0)

    def stream(played: PlayedRequest) -> None:
        played.begin_stream()
        for number in range(4):
            assert go_on.acquire(timeout=WAIT_S)
            played.send_piece(b"data: %d\n\n" % number)
        played.send_piece(b"")

    def changed(entry: str, keys: str = "") -> None:
        gateway_file(site.config, [entry], SETTINGS, keys)
        gateway.service.process.send_signal(1)

    before, site.engine.answer = site.engine.answer, stream
    with gateway.client("alice") as client:
        go_on.release()
        with client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
            pieces = answer.iter_raw()
            assert next(pieces) == b"data: 0\n\n"
            changed(f'{{url = "{url}", draining = true}}')
            until(lambda: gateway.engines()[url]["draining"], "the engine drains")
            assert gateway.ask("carol", prompt="x").status_code == 503
            go_on.release()
            assert next(pieces) == b"data: 1\n\n"
            changed('"http://127.0.0.3:1"')
            until(lambda: url not in gateway.engines(), "the engine is not named any more")
            go_on.release()
            assert next(pieces) == b"data: 2\n\n"
            site.config.write_text(site.config.read_text().replace(digest("alice"), digest("nobody")))
            gateway.service.process.send_signal(1)
            until(lambda: gateway.ask("alice", prompt="x").status_code == 401, "alice's key is taken away")
            go_on.release()
            assert b"".join(pieces) == b"data: 3\n\n"
    site.engine.answer = before
    changed(json.dumps(url))
    gateway.until_up(url)


def digest(name: str) -> str:
    return hashlib.sha256(KEYS.get(name, name).encode()).hexdigest()


def test_a_request_stays_of_the_tenant_whose_key_it_came_with(site: Site) -> None:
    """Also when its table gets another key and another tenant before its body is there."""
    with site.connection() as raw:
        raw.sendall(request().removesuffix(BODY))
        site.gateway.ask("carol", prompt="x")  # so that the gateway has seen the headers
        text = site.config.read_text()
        swapped = text.replace('[api_keys.alice]\ntenant = "red"', '[api_keys.alice]\ntenant = "blue"')
        site.config.write_text(swapped)
        site.gateway.service.process.send_signal(1)
        until(lambda: asked_as(site, "blue"), "alice's key is blue's")
        raw.sendall(BODY)
        assert read_answer(raw).startswith(b"HTTP/1.1 200 ")
    assert site.engine.got[-1][2]["kv_transfer_params"] == {"kvtier": {"tenant": "red"}}
    assert not any(text in site.gateway.log for text in ("secret prompt", *KEYS.values()))


def asked_as(site: Site, tenant: str) -> bool:
    site.gateway.ask("alice", prompt="x")
    named: str = site.engine.got[-1][2]["kv_transfer_params"]["kvtier"]["tenant"]
    return named == tenant


def test_a_stop_is_told_to_those_whose_answers_it_cuts(site: Site) -> None:
    """The last test of this gateway: nothing is said of its engine, which is sound."""
    held = threading.Event()

    def stream(played: PlayedRequest) -> None:
        played.begin_stream()
        played.send_piece(b"data: 0\n\n")
        held.wait(WAIT_S)

    site.engine.answer = stream
    with (
        site.gateway.client("alice") as client,
        client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as answer,
    ):
        pieces = answer.iter_raw()
        assert next(pieces) == b"data: 0\n\n"
        site.gateway.service.process.terminate()
        error = json.loads(b"".join(pieces).decode().removeprefix("data: "))["error"]
        held.set()
    assert (error["code"], error["message"]) == ("unavailable", "the gateway is stopping")
    assert site.gateway.service.process.wait(WAIT_S) == 0
    assert "failed in the middle" not in site.gateway.log
