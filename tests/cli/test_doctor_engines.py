"""`kvtier doctor` about engines and gateways: whether they answer, and why a gateway gives an engine no requests."""

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from certificates import Authority, Pair
from configured_pool import running
from doctor_rig import TOKEN, Diagnosis, diagnosed, engine_file, pool_file
from free_port import free_port
from gateway_rig import PlayedEngine, gateway_file
from kvtier.tiers.base import WriteStatus
from pool_rig import connect, items


@contextmanager
def an_engine(page: str) -> Iterator[str]:
    """What serves the metrics of an engine."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_another_model_than_the_others(tmp_path: Path) -> None:
    """A folder that is no model, and an engine that finds nothing of what others have put into the pool."""
    (tmp_path / "model").mkdir()
    found = diagnosed(engine_file(tmp_path, "127.0.0.1:1", "[engine]\nmodel = 'model'"))
    found.tells("engine.model", "config.json", "name a Hugging Face folder")
    shape = '{"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}'
    (tmp_path / "model" / "config.json").write_text(shape)
    found = diagnosed(engine_file(tmp_path, "127.0.0.1:1", "[engine]\nmodel = 'model'"))
    found.tells("engine.model", "no *.safetensors (the weights)", "download the complete model")
    pages = [
        "# TYPE kvtier_engine_prompt_tokens counter\nkvtier_engine_prompt_tokens_total 640.0\n"
        f'kvtier_tier_blocks_total{{tier="pool",op="write",status="stored"}} {num_stored}\n'
        for num_stored in (0, 4)
    ]
    with running(pool_file(tmp_path)) as pool, an_engine(pages[0]) as listen, an_engine(pages[1]) as writer:
        file = engine_file(tmp_path, pool.block, f"[engine]\nlisten = '{listen}'")
        assert not any("namespace" in text for text in diagnosed(file).of("warning"))
        tier = connect(pool.block, token=TOKEN)
        assert tier.write(items(range(4))) == [WriteStatus.STORED] * 4
        tier.close()
        found = diagnosed(file)
        found.tells("the pool has 4 blocks", "none of them in 640 tokens", "another namespace", level="warning")
        file = engine_file(tmp_path, pool.block, f"[engine]\nlisten = '{writer}'")
        assert not any("namespace" in text for text in diagnosed(file).of("warning")), "they are its own"


def test_a_tier_of_an_engine_that_is_off(tmp_path: Path) -> None:
    page = ["# TYPE kvtier_engine_prompt_tokens counter", "kvtier_engine_prompt_tokens_total 640.0"]
    for tier, is_in in (("disk", "off"), ("host", "writable")):
        for state in ("writable", "read_only", "off"):
            page.append(f'kvtier_tier_state{{tier="{tier}",state="{state}"}} {int(state == is_in)}')
    with an_engine("\n".join([*page, ""])) as listen:
        found = diagnosed(engine_file(tmp_path, [], f"[engine]\nlisten = '{listen}'"))
    found.tells("engine.listen", "tier disk of the engine that answers there is off", "see the engine's log")
    assert not any("tier host" in text for text in found.problems())


def test_an_engine_and_a_gateway_that_hang(tmp_path: Path) -> None:
    """The ports are in use, and nobody answers there."""
    with socket.create_server(("127.0.0.1", 0)) as hung, an_engine("") as listen:
        stopped = f"127.0.0.1:{hung.getsockname()[1]}"
        found = diagnosed(engine_file(tmp_path, [], f"[engine]\nlisten = '{stopped}'"))
        found.tells("engine.listen", f"somebody listens at http://{stopped}, and does not answer", "restart it")
        found = diagnosed(engine_file(tmp_path, [], f"[engine]\nlisten = '{listen}'"))
        found.tells("engine.listen", f"http://{listen} answers 200", level="ok")
        file = gateway_file(tmp_path / "gateway.toml", [f'"http://{listen}"'])
        file.write_text(file.read_text().replace('status_listen = "127.0.0.1:0"', f'status_listen = "{stopped}"'))
        secrets = {"RED_SECRET": "r" * 20, "BLUE_SECRET": "b" * 20, "RED_TOKEN": TOKEN, "BLUE_TOKEN": TOKEN}
        found = diagnosed(file, **secrets)
        found.tells("gateway.status_listen", f"somebody listens at http://{stopped}", "the gateway hangs")
    found = diagnosed(engine_file(tmp_path, [], f"[engine]\nlisten = '{stopped}'"))
    found.tells("engine.listen", "no engine answers", "kvtier engine serve --config", level="note")


def test_a_gateways_engines_pool_and_tokenizer(tmp_path: Path) -> None:
    dead, secrets = free_port(), {"RED_SECRET": "r" * 20, "BLUE_SECRET": "b" * 20, "BLUE_TOKEN": TOKEN}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    with PlayedEngine() as engine, running(pool_file(tmp_path)) as pool:
        pool_table = f"[pool]\naddress = '{pool.block}'\n"
        file = gateway_file(
            tmp_path / "gateway.toml", [f'"{engine.url}"', f'"http://127.0.0.1:{dead}"'], top=pool_table
        )
        found = diagnosed(file, RED_TOKEN=TOKEN, **secrets)
        found.tells("gateway.engines", "1 of 2 answer", level="ok")
        found.tells(f"gateway.engines http://127.0.0.1:{dead}", "Connection refused", "start it", level="warning")
        found.tells("the pool answers tenant 'red'", level="ok")
        found.tells("pool.address", "refuses the token of tenant 'blue'")
        engine.page = "vllm:num_requests_running 0.0\n"
        file = gateway_file(tmp_path / "gateway.toml", [f'"{engine.url}"'], "tokenizer = 'model'")
        found = diagnosed(file, RED_TOKEN=TOKEN, **secrets)
        found.tells("gateway.engines", "does not show that it runs kvtier", "cache_salt")
        found.tells("gateway.tokenizer", "tokenizer.json cannot be read")


@contextmanager
def an_engine_with_tls(pair: Pair) -> Iterator[str]:
    """Its host and port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    with PlayedEngine() as engine:
        engine.socket = context.wrap_socket(engine.socket, server_side=True)
        yield engine.url.removeprefix("http://")


def test_a_gateways_engines_and_tls(tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path), Authority(tmp_path, "stranger")
    secrets = {"RED_SECRET": "r" * 20, "BLUE_SECRET": "b" * 20, "RED_TOKEN": TOKEN, "BLUE_TOKEN": TOKEN}
    good, misnamed = authority.issue("good", "127.0.0.1"), authority.issue("misnamed", "elsewhere.example")
    with (
        PlayedEngine() as plain,
        an_engine_with_tls(good) as encrypted,
        an_engine_with_tls(misnamed) as named_otherwise,
    ):
        place = plain.url.removeprefix("http://")
        urls = [f"https://{encrypted}", f"http://{encrypted}", f"https://{named_otherwise}", f"https://{place}"]

        def found(settings: str) -> Diagnosis:
            file = gateway_file(tmp_path / "gateway.toml", [f'"{url}"' for url in urls], settings)
            return diagnosed(file, **secrets)

        with_ca = found(f"engine_tls_ca = '{authority.certificate}'")
        with_ca.tells("1 of 4 answer", level="ok")
        with_ca.tells(urls[1], "it speaks TLS", f"write https://{encrypted}", level="warning")
        with_ca.tells(urls[2], "is not for '127.0.0.1'", "a name that the certificate is for", level="warning")
        with_ca.tells(urls[3], "it speaks no TLS", f"write http://{place}", level="warning")
        found("").tells(urls[0], "unable to get local issuer", "set gateway.engine_tls_ca to the CA that has")
        found(f"engine_tls_ca = '{stranger.certificate}'").tells(urls[0], "is gateway.engine_tls_ca the right file?")
