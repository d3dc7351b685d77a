"""`kvtier top` on a terminal and in a pipe, beside real pools that come, go and come back."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from kvtier.cli.stats.asking import Places
from kvtier.cli.top.picture import Watch
from kvtier.config import token_sha256
from kvtier.system.processes import Service
from kvtier_bench.measuring.blocks import Rotation
from kvtier_bench.processes.pool_process import pool_process
from terminal import ESCAPES, Terminal, on_terminal

MIB = 1 << 20
OPERATOR = "of-ann-0123456789abcdef"
COMMAND = [sys.executable, "-m", "kvtier.cli.main", "top"]


def terminal(*arguments: str) -> AbstractContextManager[Terminal]:
    return on_terminal([*COMMAND, *arguments])


def test_a_terminal_and_a_pipe(tmp_path: Path) -> None:
    """Beside a pool that dies at the end, and comes back: it counts from zero, and nothing shown is negative."""
    (tmp_path / "token").write_text(OPERATOR)
    settings = ["[operators.ann]", f'token_sha256 = ["{token_sha256(OPERATOR)}"]']
    with ExitStack() as screens:
        with pool_process(tmp_path, 64 * MIB, settings) as pool, ExitStack() as stack:
            tier = pool.tier("tcp", stack)
            rotation = Rotation(4096, 8)
            rotation.fill(tier, "there")
            arguments = ("--url", pool.http, "--token", f"file:{tmp_path}/token", "--interval", "0.2")
            with terminal(*arguments) as screen:
                screen.wait_for(rf"pool \S+ http://{pool.http}")
                rotation.reads(tier, "there", 8, ()).run()
                screen.wait_for(r"hit rate 100\.0% of")
                screen.wait_for(r" memory .* of 64\.0 MiB")
                screen.wait_for(r" bench +\S+ \S+ ")
                screen.resize(160)
                screen.wait_for(r"hit rate")
                _end(screen, b"q")
            piped = _run(*arguments, "--count", "2")
            as_json = _run(*arguments, "--url", "127.0.0.1:1", "--count", "2", "--json")
            screen = screens.enter_context(terminal("--url", pool.http, "--interval", "0.2"))
            screen.wait_for(rf"pool \S+ http://{pool.http}")
            os.kill(pool.pid, signal.SIGKILL)
        screen.wait_for(rf"down http://{pool.http} since \d\d:\d\d:\d\d")
        again = ["--config", str(tmp_path / "pool.toml"), "--http-listen", pool.http]
        with Service(["pool", "serve", *again], log=tmp_path / "log", environ={}) as second:
            second.ready()
            screen.wait_for(rf"pool \S+ http://{pool.http}, up .*")
            screen.wait_for(r"now|hit rate -")
            assert not re.search(r"-\d", ESCAPES.sub("", screen.shown))
            _end(screen, b"\x03")
    _check_piped(piped.stdout)
    _check_json(as_json.stdout)


def _end(screen: Terminal, keys: bytes) -> None:
    screen.type(keys)
    code, shown = screen.end()
    assert code == 0
    assert "\x1b[?1049l" in shown, "the other screen is left"
    assert "\x1b[?25h" in shown, "the cursor is there again"


def _check_piped(text: str) -> None:
    assert "\x1b" not in text
    assert all(len(line) <= 80 for line in text.splitlines())
    assert text.count("kvtier top") == 2


def _check_json(text: str) -> None:
    first, second = map(json.loads, text.splitlines())
    assert (first["sources"][0]["rates"], first["sources"][0]["up"]) == (None, True)
    source, nobody = second["sources"]
    assert source["facts"]["kind"] == "pool"
    assert source["rates"]["interval_s"] > 0
    assert source["rates"]["tiers"]["memory"]["evicted_per_s"] == 0
    assert source["tenants"]["bench"]["num_hits"] > 0
    assert (nobody["up"], nobody["facts"]) == (False, None)
    assert "does not answer" in nobody["problem"]


def test_once_fails_where_nobody_answers() -> None:
    answer = _run("--once", "--interval", "0.1", "--url", "127.0.0.1:1")
    assert answer.returncode == 1
    assert "down http://127.0.0.1:1 since" in answer.stdout


PAGE = """
process_start_time_seconds {started}
kvtier_engine_prompt_tokens_total {asked}
kvtier_engine_cached_tokens_total{{tier="pool"}} {cached}
kvtier_tier_blocks_total{{op="lookup",status="hit",tier="pool"}} {cached}
kvtier_tier_bytes_total{{op="read",tier="pool"}} {cached}
kvtier_corrupt_blocks_total{{tier="pool"}} {asked}
kvtier_open_breakers{{tier="pool"}} 1
"""


@pytest.mark.parametrize("starts_again", [True, False], ids=["another start", "the same start"])
def test_rates_are_of_one_process(starts_again: bool) -> None:
    with _pages() as (address, pages):
        watch = Watch(Places(None, [address], None, None), 1.0)
        pages.append(PAGE.format(started=1, asked=100, cached=50))
        (picture,) = watch.look()
        assert (picture.rates, picture.restarted) == (None, False)
        pages.append(PAGE.format(started=1, asked=300, cached=200))
        (picture,) = watch.look()
        rates = picture.rates
        assert rates is not None
        assert (rates.hit_rate.asked, rates.hit_rate.share) == (200, 0.75)
        assert rates.asked_per_s == pytest.approx(200 / rates.interval_s)
        assert rates.missed_per_s == pytest.approx(50 / rates.interval_s)
        assert rates.tiers["pool"].read_bytes_per_s == pytest.approx(150 / rates.interval_s)
        assert list(rates.trouble_per_s.values()) == [pytest.approx(200 / rates.interval_s)]
        pages.append(PAGE.format(started=2 if starts_again else 1, asked=10, cached=5))
        (picture,) = watch.look()
        assert (picture.rates, picture.restarted) == (None, True)
        pages.append("garbage{")
        (picture,) = watch.look()
        assert picture.facts is None
        assert "no metrics page" in (picture.problem or "")
        pages.append(PAGE.format(started=2 if starts_again else 1, asked=20, cached=5))
        (picture,) = watch.look()
        assert (picture.rates, picture.restarted, picture.problem) == (None, False, None)
        pages.append(PAGE.format(started=2 if starts_again else 1, asked=40, cached=10))
        (picture,) = watch.look()
        assert picture.rates is not None
        assert picture.rates.hit_rate.share == 0.25


@contextmanager
def _pages() -> Iterator[tuple[str, list[str]]]:
    """A server that answers with the last page."""
    pages: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(pages[-1].encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}", pages
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    environ = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=120, env=environ)
