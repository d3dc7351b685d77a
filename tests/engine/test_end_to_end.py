"""The whole path with real processes and the real model: a pool, engines, and a pool that dies in the middle."""

import json
import os
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.system.processes import Service
from kvtier_engine.demo.ask import post
from kvtier_engine.demo.demo_model import demo_model_path
from kvtier_engine.demo.paths import Document
from kvtier_engine.demo.stage import Stage
from kvtier_engine.demo.story import FULL
from kvtier_engine.model.model_folder import open_model
from suspending import suspended


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage.prepare(tmp_path, demo_model_path(), "bfloat16")


@pytest.fixture
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """For engines that are to hit: what misses its deadline, they compute."""
    for name in (
        "CACHE__LOOKUP_DEADLINE_S",
        "CACHE__LOAD_DEADLINE_S",
        "POOL__CONNECT_TIMEOUT_S",
        "POOL__CALL_TIMEOUT_S",
    ):
        monkeypatch.setenv(f"KVTIER__{name}", "30")


def metric(url: str, name: str) -> float:
    """Sum over all labels of a counter in /metrics."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


class Wire:
    """A TCP relay between an engine and the pool that calls `on_burst` once `burst_bytes` have come from the pool."""

    def __init__(self, pool_address: str) -> None:
        host, _, port = pool_address.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.on_burst: Callable[[], None] | None = None
        self.burst_bytes = 2**20
        self._received = 0
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()
        for end in self._sockets:
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target)
            except OSError:  # the pool is dead: its client hears so at once, as without a relay
                client.close()
                continue
            self._sockets += [client, server]
            for source, sink, counted in ((client, server, False), (server, client, True)):
                threading.Thread(target=self._relay, args=(source, sink, counted), daemon=True).start()

    def _relay(self, source: socket.socket, sink: socket.socket, counted: bool) -> None:
        try:
            while data := source.recv(2**16):
                if counted and self.on_burst is not None:
                    self._received += len(data)
                    if self._received >= self.burst_bytes:
                        on_burst, self.on_burst = self.on_burst, None
                        on_burst()
                sink.sendall(data)
        except OSError:
            pass
        finally:
            for end in (source, sink):
                try:
                    end.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue


@pytest.fixture
def pool(stage: Stage) -> Iterator[Service]:
    with stage.pool() as service:
        yield service


@pytest.mark.usefixtures("_patience")
def test_a_pool_killed_in_the_middle_of_a_fetch(stage: Stage, pool: Service) -> None:
    """Engine A fills the pool; the pool dies by SIGKILL while engine B fetches. B answers what a cacheless one does."""
    wire = Wire(pool.ready()["block"])
    # Forty times what has come from the pool when it dies.
    prompt = {"prompt": "the quick brown fox " * 240, "max_tokens": 24, "temperature": 0}
    # float32: after the kill, B computes in other chunks than A did, which may flip a near tie in bfloat16.
    with stage.engine("a", tenant="red", pool_address=wire.address, dtype="float32") as engine:
        cold = post(f"{engine.ready()['url']}/v1/completions", prompt)
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    with stage.engine("b", tenant="red", pool_address=wire.address, dtype="float32") as engine:
        url = engine.ready()["url"]
        wire.on_burst = pool.kill
        degraded = post(f"{url}/v1/completions", prompt)
        assert pool.process.poll() is not None, "the pool was killed while its bytes were on the way"
        assert metric(url, "kvtier_degraded_fetches_total") == 1
        usage = degraded["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] < 0.95 * usage["prompt_tokens"]
        assert degraded["kvtier"]["token_ids"] == cold["kvtier"]["token_ids"]
        again = post(f"{url}/v1/completions", prompt)
        usage = again["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens_by_tier"]["device"] > 0.95 * usage["prompt_tokens"]
        assert again["kvtier"]["token_ids"] == cold["kvtier"]["token_ids"]
    wire.close()


def test_a_pool_that_hangs_costs_its_deadline_and_no_request(stage: Stage, pool: Service) -> None:
    """SIGSTOP: connections stay open and nobody answers."""
    address = pool.ready()["block"]
    with stage.engine("a", tenant="red", pool_address=address) as engine:
        url = engine.ready()["url"]
        with suspended(pool.process.pid):
            answer = post(f"{url}/v1/completions", {"prompt": "word " * 64, "max_tokens": 2, "temperature": 0})
        assert len(answer["kvtier"]["token_ids"]) == 2
        assert metric(url, "kvtier_deadlines_missed_total") + metric(url, "kvtier_io_errors_total") >= 1


@pytest.mark.usefixtures("_patience")
def test_the_demo(tmp_path: Path) -> None:
    """`kvtier demo`, with less of everything; its speed is a benchmark's business."""
    plot = tmp_path / "demo.svg"
    command = [sys.executable, "-m", "kvtier.cli.main", "demo", "--quick", "--json", "--plot", str(plot)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as demo:
        try:
            out, report = demo.communicate(timeout=280)
        finally:
            demo.terminate()  # it ends its processes; they would outlive a kill
    assert demo.returncode == 0, report
    figures = json.loads(out)
    assert figures["problems"] == []
    assert list(figures["ttft_ms"]) == ["computed", "pool over TCP", "pool, shared memory", "host memory", "device"]
    assert figures["other_tenant"]["cached_tokens"] == 0
    assert [turn["engine"] for turn in figures["turns"]] == list("ABABAB")
    assert figures["turns"][1]["answer"]["cached_by_tier"]["pool"] > 500
    assert set(figures["restart"]["blocks_by_source"]) == {"disk"}
    assert set(figures["death"]["back"]["blocks_by_source"]) == {"disk"}
    assert set(figures["redis"]["blocks_by_source"]) == {"redis"}
    assert figures["differing_answers"]["float32"] == 0
    assert max(len(line) for line in report.splitlines()) <= 80
    assert plot.read_text().startswith("<svg")


def test_the_demos_questions_share_a_long_document(tmp_path: Path) -> None:
    cache_dir = Path(os.environ.get("KVTIER__ENGINE__MODEL_CACHE_DIR", tmp_path))
    encode = open_model(demo_model_path(), cache_dir).tokenizer.encode_chat
    document = Document.make(0, FULL.num_people)
    first, second = (encode(document.question(number)).tolist() for number in (0, 1))
    assert first[:2900] == second[:2900]
    assert first != second
