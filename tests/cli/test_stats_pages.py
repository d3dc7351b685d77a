"""Where `kvtier stats` asks, and what it takes for no metrics page."""

import socket
import threading
from pathlib import Path

import pytest

from kvtier.cli.stats.asking import Places
from kvtier.cli.stats.samples import fetch, metrics_url, parse
from kvtier.errors import ConfigError, InvalidInputError, UnavailableError


def test_a_token_does_not_go_in_the_clear(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("of-an-observer-0123456789")
    places = Places(None, ["pool.example:7602"], None, f"file:{tmp_path}/token")
    (heard,) = places.ask()
    assert "in the clear" in (heard.problem or "")
    with pytest.raises(ConfigError, match=r'^command line: --token: use "env:NAME" or "file:PATH"'):
        Places(None, ["127.0.0.1:1"], None, "nonsense")


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (b"-ERR unknown command\r\n", "does not answer"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "does not answer"),
        (
            b"HTTP/1.1 400 Bad Request\r\nContent-Length: 99\r\n\r\nthis is\x1b another port",
            "400 Bad Request: this is another",
        ),
        (b"HTTP/1.1 400 Bad Request\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "is it an engine or a pool"),
    ],
)
def test_something_else_that_listens(reply: bytes, words: str) -> None:
    def serve() -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(reply)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(UnavailableError, match=words):
            fetch(metrics_url(f"127.0.0.1:{listening.getsockname()[1]}"))
        thread.join()


@pytest.mark.parametrize("text", ["file:///etc/passwd", "ftp://host:1", "http://", "127.0.0.1:0", "host:port", ""])
def test_places_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="name an engine or a pool"):
        metrics_url(text)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("host:7602", "http://host:7602/metrics"),
        ("http://host:7602/", "http://host:7602/metrics"),
        ("https://host/other", "https://host/other"),
        ("[::1]:7602", "http://[::1]:7602/metrics"),
    ],
)
def test_places(text: str, url: str) -> None:
    assert metrics_url(text) == url


def test_nonsense_is_no_page() -> None:
    with pytest.raises(InvalidInputError, match="no metrics page"):
        parse("{]", source="it")
