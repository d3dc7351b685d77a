"""A gateway in a process of its own, engines that a test plays itself, and clients."""

import contextlib
import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

from cache_pool import TOKENS, WAIT_S, until
from kvtier.system.processes import Service

KEYS = {name: f"key-of-{name}-for-tests" for name in ("alice", "bob", "carol")}
TENANTS = {"alice": "red", "bob": "blue", "carol": "red"}
MODEL = "tiny"


def gateway_file(path: Path, engines: Sequence[str], settings: str = "", keys: str = "", top: str = "") -> Path:
    """A gateway's configuration, written as editors do it.

    :param engines: entries of `gateway.engines` as TOML.
    :param keys: more lines of alice's table.
    """
    tables = ""
    for name, tenant in TENANTS.items():
        digest = hashlib.sha256(KEYS[name].encode()).hexdigest()
        more = keys if name == "alice" else ""
        tables += f'[api_keys.{name}]\ntenant = "{tenant}"\nkey_sha256 = ["{digest}"]\n{more}\n'
    fresh = path.with_suffix(".fresh")
    fresh.write_text(
        f'{top}\n[gateway]\nlisten = "127.0.0.1:0"\nstatus_listen = "127.0.0.1:0"\nprobe_interval_s = 0.1\n'
        f"engines = [{', '.join(engines)}]\n{settings}\n{tables}\n"
        '[tenants.red]\nsecret = "env:RED_SECRET"\ntoken = "env:RED_TOKEN"\n'
        '[tenants.blue]\nsecret = "env:BLUE_SECRET"\ntoken = "env:BLUE_TOKEN"\n'
    )
    fresh.replace(path)
    return path


class Gateway:
    """`kvtier gateway serve`, and clients of it."""

    def __init__(self, service: Service, log: Path) -> None:
        self.service, self._log = service, log
        ready = service.ready()
        self.url, self.status = ready["url"], ready["status"]

    def client(self, name: str | None) -> httpx.Client:
        """A client with this key, for the caller to close; None: without any."""
        headers = {} if name is None else {"Authorization": f"Bearer {KEYS[name]}"}
        limits = httpx.Limits(max_keepalive_connections=0)
        return httpx.Client(base_url=self.url, headers=headers, timeout=WAIT_S, limits=limits)

    def ask(self, name: str | None, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        """The answer to a request of this key."""
        with self.client(name) as client:
            return client.post(path, json={"model": MODEL, "temperature": 0, **body})

    def metric(self, name: str, *labels: str) -> float:
        """Sum of the samples of this name with all of these labels."""
        lines = httpx.get(f"{self.status}/metrics", timeout=WAIT_S).text.splitlines()
        found = [
            line for line in lines if line.startswith((f"{name}{{", f"{name} ")) and all(x in line for x in labels)
        ]
        return sum(float(line.rpartition(" ")[2]) for line in found)

    def engines(self) -> dict[str, Any]:
        """What it says of its engines, by URL."""
        return {each["url"]: each for each in httpx.get(f"{self.status}/engines", timeout=WAIT_S).json()["engines"]}

    def until_up(self, url: str, is_up: bool = True) -> None:
        """Waits until it knows that an engine is up, or is not."""
        until(lambda: url in self.engines() and self.engines()[url]["up"] is is_up, f"{url} is up: {is_up}")

    def says(self, text: str) -> None:
        """Waits for it in the log."""
        until(lambda: text in self._log.read_text(), text)

    @property
    def log(self) -> str:
        """What it has logged."""
        return self._log.read_text()


@contextlib.contextmanager
def running_gateway(config: Path, **environ: str) -> Iterator[Gateway]:
    """The gateway with this configuration."""
    log = config.with_suffix(".log")
    secrets = {f"{name.upper()}_SECRET": f"the secret of {name}, for tests" for name in TOKENS}
    secrets |= {f"{name.upper()}_TOKEN": token for name, token in TOKENS.items()}
    with Service(["gateway", "serve", "--config", str(config)], log=log, environ=secrets | environ) as service:
        yield Gateway(service, log)


Answer = Callable[["PlayedRequest"], None]


class PlayedRequest(BaseHTTPRequestHandler):
    """A request that a played engine has got."""

    protocol_version = "HTTP/1.1"
    server: "PlayedEngine"  # type: ignore[assignment]

    def do_GET(self) -> None:
        pages = {
            "/health": "{}",
            "/metrics": self.server.page,
            "/v1/models": json.dumps({"data": [{"id": MODEL, "object": "model", "root": "/a/secret/path"}]}),
        }
        self.say(pages[self.path].encode())

    def do_POST(self) -> None:
        self.body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.got.append((self.path, dict(self.headers), self.body))
        self.server.answer(self)

    def say(self, page: bytes, status: int = 200) -> None:
        """Answers with this."""
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def begin_stream(self) -> None:
        """Begins a streamed answer that ends with the connection."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def send_piece(self, data: bytes) -> None:
        """One piece of it; none ends it."""
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def log_message(self, format: str, *args: Any) -> None:
        pass


class PlayedEngine(ThreadingHTTPServer):
    """An engine that answers as a test likes. A context manager."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, answer: Answer = lambda request: request.say(b'{"choices": []}')) -> None:
        super().__init__(("127.0.0.1", 0), PlayedRequest)
        self.answer = answer
        self.page = 'vllm:num_requests_running 0.0\nvllm:kvtier_build_info{version="1"} 1.0\n'
        """What its /metrics says."""
        self.got: list[tuple[str, dict[str, str], Any]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self) -> "PlayedEngine":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that go away are part of the game."""
