"""A rig's engine behind HTTP, in this process: for faults and readers that a test must hold in its hands."""

import contextlib
import json
import socket
import string
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from engine_process import NO_KEEP_ALIVE
from engine_rig import PATIENCE_S, EngineRig, RunningEngine
from kvtier_engine.api.server import Server
from kvtier_engine.model.llama import Chunk
from kvtier_engine.model.paged_kv import PagedKV
from kvtier_engine.text.detokenizer import BYTE_OF_CHARACTER
from kvtier_engine.text.tokenizer import ChatTokenizer
from tiny_model import MODEL, VOCABULARY

MAX_TOTAL_TOKENS = 500
_BYTES = [*dict.fromkeys("éä日😀".encode() + string.ascii_letters.encode())][:VOCABULARY]
"""Tokens: parts of long characters, which a random model rarely puts together, and letters."""


class PacedModel:
    """The rig's model, one step per permit; a step without one waits. `fail_from` makes later steps fail."""

    def __init__(self) -> None:
        self.permits = threading.Semaphore(0)
        self.num_steps = 0
        self.fail_from: int | None = None
        self._is_free = False

    def forward(self, chunks: Sequence[Chunk], kv: PagedKV) -> Tensor:
        assert self._is_free or self.permits.acquire(timeout=PATIENCE_S)
        if self.fail_from is not None and self.num_steps >= self.fail_from:
            raise RuntimeError("the memory is on fire")
        self.num_steps += 1
        return MODEL.forward(chunks, kv)

    def free(self) -> None:
        """From now on no step waits."""
        self._is_free = True
        self.permits.release()  # for the one that waits already


class ServedEngine:
    """What a test talks to."""

    def __init__(self, rig: EngineRig, running: RunningEngine, tokenizer: ChatTokenizer, url: str) -> None:
        self.rig, self.running, self.tokenizer = rig, running, tokenizer
        self.client = httpx.Client(base_url=url, timeout=PATIENCE_S, limits=NO_KEEP_ALIVE)
        self.address = (self.client.base_url.host, self.client.base_url.port)

    def complete(self, **body: Any) -> dict[str, Any]:
        response = self.client.post("/v1/completions", json={"temperature": 0, **body})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def stream(self, **body: Any) -> list[Any]:
        """The events of a streamed completion, `[DONE]` as None."""
        body = {"temperature": 0, "stream": True, **body}
        with self.client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            return [parse_event(line) for line in response.iter_lines() if line]


def parse_event(line: str) -> Any:
    assert line.startswith("data: ")
    data = line.removeprefix("data: ")
    return None if data == "[DONE]" else json.loads(data)


@contextlib.contextmanager
def served_engine(folder: Path, model: PacedModel | None = None, name: str = "tiny") -> Iterator[ServedEngine]:
    """:param model: in place of the rig's."""
    _tokenizer().save(str(folder / "tokenizer.json"))
    tokenizer = ChatTokenizer(folder)
    rig = EngineRig(tiers=False, num_blocks=300)
    if model is not None:
        rig.scheduler._model = model
    running = RunningEngine(rig, MAX_TOTAL_TOKENS, fails=model is not None and model.fail_from is not None)
    with socket.create_server(("127.0.0.1", 0)) as listener, running as engine:
        app = Server(engine, tokenizer, model_names=(name,), eos_token_ids=(), registry=rig.registry).app()
        config = uvicorn.Config(app, loop="asyncio", log_config=None, lifespan="off", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        host, port = listener.getsockname()
        served = ServedEngine(rig, running, tokenizer, f"http://{host}:{port}")
        try:
            yield served
        finally:
            if model is not None:
                model.free()
            served.client.close()
            server.should_exit = True
            thread.join(PATIENCE_S)
    assert not thread.is_alive()


def _tokenizer() -> Tokenizer:
    alphabet = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}
    vocab = {alphabet[byte]: i for i, byte in enumerate(_BYTES)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
