"""The proxy before engines that the test plays: what goes on, what comes back, and what happens when one fails."""

import contextlib
import http.client
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cache_pool import WAIT_S, until
from gateway_rig import KEYS, MODEL, Gateway, PlayedEngine, PlayedRequest, gateway_file, running_gateway

EVENT = b'data: {"choices": []}\n\n'
FAST = "probe_timeout_s = 60\nprobe_failures = 1\nsend_timeout_s = 2\nshutdown_grace_s = 5\nmax_connections = 700"


class Site:
    """A gateway before two played engines, of which the second is down until a test wants it."""

    def __init__(self, folder: Path, engine: PlayedEngine, gateway: Gateway) -> None:
        self.folder, self.engine, self.gateway = folder, engine, gateway

    @contextlib.contextmanager
    def answering(self, answer: object) -> Iterator[None]:
        before, self.engine.answer = self.engine.answer, answer  # type: ignore[assignment]
        try:
            yield
        finally:
            self.engine.answer = before


@contextlib.contextmanager
def running_site(folder: Path) -> Iterator[Site]:
    with PlayedEngine() as engine:
        config = gateway_file(folder / "gateway.toml", [json.dumps(engine.url)], FAST, "max_concurrent = 600")
        with running_gateway(config) as gateway:
            gateway.until_up(engine.url)
            yield Site(folder, engine, gateway)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with running_site(tmp_path_factory.mktemp("site")) as running:
        yield running


@pytest.fixture
def own_site(tmp_path: Path) -> Iterator[Site]:
    """What the gateway learns in it makes no difference to other tests."""
    with running_site(tmp_path) as running:
        yield running


def test_a_configuration_that_is_read_slowly_holds_up_no_request(own_site: Site) -> None:
    """It is a pipe that somebody has begun to write into. An engine that fails meanwhile is told of once."""
    site = own_site
    config = site.folder / "gateway.toml"
    text = config.read_text()
    os.mkfifo(site.folder / "pipe")
    (site.folder / "pipe").replace(config)
    site.gateway.service.process.send_signal(signal.SIGHUP)
    writers: list[int] = []

    def is_being_read() -> bool:
        with contextlib.suppress(OSError):
            writers.append(os.open(config, os.O_WRONLY | os.O_NONBLOCK))
        return bool(writers)

    until(is_being_read, "it is being read")
    os.write(writers[0], text[:9].encode())
    assert site.gateway.ask("alice", prompt="x").status_code == 200
    with site.answering(lambda request: request.say(b"{}", status=503)):
        assert {site.gateway.ask("alice", prompt="x").status_code for _ in range(5)} == {503}
    assert site.gateway.log.count("did not answer a request: it answers 503") == 1
    os.write(writers[0], text[9:].encode())
    os.close(writers[0])
    site.gateway.says("SIGHUP: the gateway has the ")
    # Nor is a pipe waited for whose writer does not end, be it this file or that of a secret.
    site.gateway.service.process.send_signal(signal.SIGHUP)
    writers.clear()
    until(is_being_read, "it is being read again")
    os.write(writers[0], text.encode())
    site.gateway.says("nobody has written all of it in 3 s")
    os.close(writers[0])
    config.unlink()
    config.write_text(text.replace("key_sha256 = [", 'key_sha256 = ["file:digest", ', 1))
    os.mkfifo(site.folder / "digest")
    site.gateway.says("key_sha256: cannot read ")
    config.write_text(text)
    site.gateway.service.process.send_signal(signal.SIGHUP)
    until(lambda: site.gateway.log.count("SIGHUP: the gateway has the ") == 2, "it is read again")


def test_only_what_may_go_on_goes_on(site: Site) -> None:
    with site.gateway.client("alice") as client:
        client.headers.update(
            {"X-Request-Id": "my-id", "X-Data-Parallel-Rank": "1", "Cookie": "c=1", "traceparent": "00-1-2-01"}
        )
        body = {"model": MODEL, "prompt": "x", "kv_transfer_params": {"kvtier": {"tenant": "blue"}}}
        answer = client.post("/v1/completions?cache_salt=blue", json=body)
    assert (answer.status_code, answer.headers["X-Request-Id"]) == (200, "my-id")
    path, headers, got = site.engine.got[-1]
    assert path == "/v1/completions"
    assert got == {"model": MODEL, "prompt": "x", "kv_transfer_params": {"kvtier": {"tenant": "red"}}}
    names = {name.lower() for name in headers}
    expected = "host content-type content-length accept-encoding x-request-id traceparent accept user-agent"
    assert names <= set(expected.split())
    assert site.gateway.metric("kvtier_gateway_stripped_parameters_total", 'parameter="kv_transfer_params"') == 1


def test_what_is_refused(site: Site) -> None:
    gateway, num_before = site.gateway, len(site.engine.got)

    def refused(answer: httpx.Response) -> tuple[int, str | None]:
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return answer.status_code, error["code"]

    assert refused(gateway.ask(None, prompt="x")) == (401, "invalid_api_key")
    assert refused(gateway.ask("alice", prompt="x", model="other")) == (404, "model_not_found")
    assert refused(gateway.ask("alice", prompt="x", new_parameter=1)) == (400, "unknown_parameter")
    host, port = gateway.url.removeprefix("http://").split(":")
    with gateway.client("alice") as client:
        for method, path, status in (
            ("POST", "/v1/cache/reset", 404), ("POST", "/v1/completions/", 404), ("POST", "//v1/completions", 404),
            ("POST", "/v1/%63ompletions", 404), ("POST", "/v1/chat/../completions", 404), ("POST", "/tokenize", 404),
            ("POST", "/v1/load_lora_adapter", 404), ("GET", "/metrics", 404), ("PUT", "/v1/completions", 405),
            ("GET", "/v1/completions", 405), ("POST", "/v1/models", 405), ("GET", "/v1/models/other", 404),
        ):  # fmt: skip
            raw_client = http.client.HTTPConnection(host, int(port), timeout=WAIT_S)
            raw_client.request(method, path, b'{"prompt": "x"}', {"Authorization": f"Bearer {KEYS['alice']}"})
            answer = raw_client.getresponse()
            assert (answer.status, set(json.loads(answer.read()))) == (status, {"error"}), path
            raw_client.close()
        assert refused(client.post("/v1/completions", content=b"x" * (17 << 20)))[0] == 413
        packed = {"Content-Encoding": "gzip"}
        assert refused(client.post("/v1/completions", content=b"x", headers=packed))[0] == 415
        models = client.get("/v1/models").json()
        assert models == {"object": "list", "data": [{"id": MODEL, "object": "model"}]}
    assert len(site.engine.got) == num_before
    with socket.create_connection((host, int(port)), WAIT_S) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 20_000 + b"\r\n\r\n")
        assert b" 400 " in raw.recv(100)
    with socket.create_connection((host, int(port)), WAIT_S) as raw:
        smuggled = b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n"
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + smuggled + b"\r\n0\r\n\r\nPOST")
        assert b" 400 " in raw.recv(100)


def test_pieces_come_as_they_are_sent_and_a_client_that_leaves_is_told_on(site: Site) -> None:
    go_on, gone = threading.Semaphore(0), threading.Event()

    def stream(request: PlayedRequest) -> None:
        request.begin_stream()
        try:
            while go_on.acquire(timeout=WAIT_S):
                request.send_piece(EVENT)
        except OSError:
            gone.set()

    with site.answering(stream), site.gateway.client("alice") as client:
        go_on.release()
        with client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
            assert answer.headers["content-type"] == "text/event-stream"
            pieces = answer.iter_raw()
            for _ in range(3):  # each is there before the next one is sent
                assert next(pieces) == EVENT
                go_on.release()
        until(lambda: go_on.release() is None and gone.is_set(), "the engine hears that the client is gone")
    until(lambda: site.gateway.metric("kvtier_gateway_running") == 0, "the request is over")


def test_an_engine_that_fails_before_a_byte_and_after_one(site: Site) -> None:
    """What has begun ends with an error; what has not goes to another engine."""
    gateway = site.gateway

    def break_off(request: PlayedRequest) -> None:
        if request.body["prompt"] == "begin":
            request.begin_stream()
            request.send_piece(EVENT)
        request.connection.shutdown(socket.SHUT_RDWR)

    def knows_nobody(request: PlayedRequest) -> None:
        """As kvtier's own engine does without `gateway_tenants`."""
        error = {"message": "'red' is no tenant of this engine", "param": "kv_transfer_params.kvtier.tenant"}
        request.say(json.dumps({"error": error}).encode(), status=400)

    with PlayedEngine() as second, site.answering(break_off):
        engines = [json.dumps(site.engine.url), json.dumps(second.url)]
        gateway_file(site.folder / "gateway.toml", engines, FAST, "max_concurrent = 600")
        gateway.until_up(second.url)
        for _ in range(8):
            assert gateway.ask("alice", prompt="x").status_code == 200
        assert gateway.metric("kvtier_gateway_attempts_total", 'outcome="lost"') >= 1
        with site.answering(knows_nobody):
            for _ in range(8):
                assert gateway.ask("alice", prompt="x").status_code == 200
        assert gateway.metric("kvtier_gateway_attempts_total", 'outcome="refused"') >= 1
        assert len(second.got) == 16
        # A second engine that is to be taken away gets nothing more.
        engines[1] = f'{{url = "{second.url}", draining = true}}'
        gateway_file(site.folder / "gateway.toml", engines, FAST, "max_concurrent = 600")
        gateway.service.process.send_signal(1)
        until(lambda: gateway.engines()[second.url]["draining"], "the second engine drains")
        answer = gateway.ask("alice", prompt="begin", stream=True)
        assert answer.text.startswith(EVENT.decode())
        assert json.loads(answer.text.split("data: ")[2])["error"]["code"] == "engine_failed"
        refused = gateway.ask("alice", prompt="x")
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
    gateway_file(site.folder / "gateway.toml", engines[:1], FAST, "max_concurrent = 600")
    gateway.service.process.send_signal(1)
    until(lambda: len(gateway.engines()) == 1, "the second engine is gone")


def test_five_hundred_clients_that_read_nothing_cost_nobody_anything(site: Site) -> None:
    """Each has a large answer under way. They are cut when they have taken nothing for a while."""
    gateway, big = site.gateway, b"data: " + b"x" * (8 << 20) + b"\n\n"

    def flood(request: PlayedRequest) -> None:
        if not request.body.get("stream"):
            request.say(b"{}")
            return
        with contextlib.suppress(OSError):
            request.begin_stream()
            request.send_piece(big)

    host, port = gateway.url.removeprefix("http://").split(":")
    body = b'{"prompt": "x", "stream": true}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEYS['alice']}\r\n"
    with site.answering(flood), contextlib.ExitStack() as slow:
        before = peak_bytes(gateway)
        for _ in range(500):
            raw = slow.enter_context(socket.socket())
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.connect((host, int(port)))
            raw.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert gateway.ask("bob", prompt="x").status_code == 200
        until(lambda: gateway.metric("kvtier_gateway_stalled_clients_total") >= 500, "the slow ones are cut")
        assert peak_bytes(gateway) - before < 300 << 20
    until(lambda: gateway.metric("kvtier_gateway_running") == 0, "they are gone")


def peak_bytes(gateway: Gateway) -> int:
    """The most memory that the gateway's process has had."""
    lines = Path(f"/proc/{gateway.service.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def test_bodies_and_keys_are_not_in_the_log(site: Site) -> None:
    """And a stop lets what runs end, while new requests hear that it stops. Kept connections do not delay it."""
    release, is_there = threading.Event(), threading.Event()

    def hold(request: PlayedRequest) -> None:
        is_there.set()
        assert release.wait(WAIT_S)
        request.say(b'{"choices": ["late"]}')

    gateway = site.gateway
    with site.answering(hold):
        answers: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answers.append(gateway.ask("alice", prompt="a very secret prompt")))
        asking.start()
        assert is_there.wait(WAIT_S)
        kept = [httpx.Client(base_url=url) for url in (gateway.url, gateway.status)]
        assert [client.get("/healthz").status_code for client in kept] == [200, 200]
        gateway.service.process.terminate()

        def refuses() -> bool:
            try:
                return gateway.ask("alice", prompt="x").status_code == 503
            except httpx.TransportError:
                return True

        until(refuses, "it takes no new requests")
        release.set()
        asking.join(WAIT_S)
        assert answers[0].json() == {"choices": ["late"]}
    assert gateway.service.process.wait(WAIT_S) == 0
    for client in kept:
        client.close()
    assert not any(text in gateway.log for text in ("secret prompt", *KEYS.values()))
