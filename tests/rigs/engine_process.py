"""The engine as users run it: a process of its own on the real model."""

import contextlib
import json
import os
import queue
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai

from kvtier_engine.demo.demo_model import demo_model_path

PATIENCE_S = 60.0
NO_KEEP_ALIVE = httpx.Limits(max_keepalive_connections=0)
"""For clients that live longer than a test, which leaves no connection open."""
MODEL_NAME = "SmolLM2-135M-Instruct.Q4_1"
FRANCE = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
CONFIG = """
tenant = "red"
[tenants.red]
secret = "env:RED_SECRET"
[engine]
model = {model}
listen = "127.0.0.1:0"
allowed_hosts = ["A.proxy"]
dtype = "float32"
kv_bytes = "64MiB"
max_batch_tokens = 256
[host]
capacity_bytes = "64MiB"
"""

_WITH_GRACE = "import kvtier.cli.main, kvtier_engine.cli as cli; cli._SHUTDOWN_GRACE_S = {}; kvtier.cli.main.main()"


@dataclass
class EngineProcess:
    process: subprocess.Popen[str]
    client: httpx.Client
    first_page: str
    """The metrics before anybody asked for anything."""

    @property
    def address(self) -> tuple[str, int]:
        assert self.client.base_url.port is not None
        return self.client.base_url.host, self.client.base_url.port

    def chat(self, **body: Any) -> dict[str, Any]:
        return self.post("/v1/chat/completions", {"messages": FRANCE, "temperature": 0, **body})

    def complete(self, **body: Any) -> dict[str, Any]:
        return self.post("/v1/completions", {"temperature": 0, **body})

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = self.client.post(path, json=body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def metric(self, name: str) -> float:
        for line in self.client.get("/metrics").text.splitlines():
            if line.startswith(name + " "):
                return float(line.rpartition(" ")[2])
        return 0.0


@contextlib.contextmanager
def engine_process(
    folder: Path, *, config: str = CONFIG, ca: Path | None = None, grace_s: int | None = None, **environ: str
) -> Iterator[EngineProcess]:
    """
    :param ca: of the engine's certificate.
    :param grace_s: what requests get at a stop, for tests that have to wait for all of it.
    """
    file = folder / "engine.toml"
    file.write_text(config.format(model=json.dumps(str(demo_model_path()))))
    process = start_engine(file, grace_s=grace_s, **environ)
    verify = True if ca is None else ssl.create_default_context(cafile=ca)
    try:
        url = _ready_url(process)
        with httpx.Client(base_url=url, timeout=PATIENCE_S, limits=NO_KEEP_ALIVE, verify=verify) as client:
            yield EngineProcess(process, client, client.get("/metrics").text)
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE_S)


def start_engine(config: Path, *options: str, grace_s: int | None = None, **environ: str) -> subprocess.Popen[str]:
    program = ["-m", "kvtier.cli.main"] if grace_s is None else ["-c", _WITH_GRACE.format(grace_s)]
    return subprocess.Popen(
        [sys.executable, *program, "engine", "serve", "--config", str(config), *options],
        env=os.environ | {"RED_SECRET": "a secret of more than sixteen bytes"} | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _ready_url(process: subprocess.Popen[str]) -> str:
    lines: queue.Queue[str] = queue.Queue()
    assert process.stdout is not None
    threading.Thread(target=lambda: lines.put(process.stdout.readline()), daemon=True).start()
    line = lines.get(timeout=PATIENCE_S)
    if not line.startswith("ready url="):
        process.kill()
        raise AssertionError(f"not ready: {line!r} {process.communicate(timeout=PATIENCE_S)[1]}")
    return line.removeprefix("ready url=").strip()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.01)


def official_client(url: str) -> openai.OpenAI:
    """OpenAI's own client, for the caller to close."""
    http = openai.DefaultHttpxClient(limits=NO_KEEP_ALIVE, timeout=PATIENCE_S)
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none needed", max_retries=0, http_client=http)
