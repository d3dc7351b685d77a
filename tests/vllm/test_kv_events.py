"""KV events of a real engine: what a router that listens believes of its host memory is what the engine then hits."""

import itertools
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import tiny_llama
import zmq
from engine_lab import Engine, Lab
from kv_events_rig import CPU, GPU, Router
from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher
from vllm_rig import BLOCK, Answer, cached_of, make_prompts, settings, transfer

from cache_pool import WAIT_S, until

WINDOW = 80
GROUPS = 2
SALT = "pepper"
ADAPTER = "adapter-1"
"""As `engine_driver` names the first one."""


class Listener:
    """Asks an engine for all its batches, by the socket on which vLLM repeats what a subscriber has missed."""

    def __init__(self, folder: Path) -> None:
        address = f"ipc://{folder}/replay"
        # Where vLLM publishes. It listens on all interfaces if that is a TCP port of its own.
        self.config = {
            "enable_kv_cache_events": True,
            "endpoint": f"ipc://{folder}/events",
            "replay_endpoint": address,
        }
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.RCVTIMEO, int(1000 * WAIT_S))
        self._socket.connect(address)
        self._next = 0
        self.router = Router()

    def hear(self) -> Router:
        """Everything up to now."""
        self._socket.send_multipart([b"", self._next.to_bytes(8, "big")])
        while True:
            _, _, number, batch = self._socket.recv_multipart()
            if number == ZmqEventPublisher.END_SEQ:
                return self.router
            assert int.from_bytes(number, "big") == self._next
            self._next += 1
            self.router.hear(msgspec.msgpack.decode(batch, type=KVEventBatch).events)

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture(scope="module")
def running(lab: Lab) -> Iterator[tuple[Engine, Listener]]:
    """An engine with two KV groups, host memory for some of the prompts, and somebody who listens."""
    tiny_llama.make(lab.home / "hybrid for events", seed=0, window=WINDOW)
    connector = transfer(settings(host={"capacity_bytes": "1MiB"}))
    lora = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    options = {"model": lab.home / "hybrid for events", "processes": True, **lora}
    with (
        closing(Listener(lab.home)) as listener,
        lab.engine(connector, kv_events_config=listener.config, **options) as engine,
    ):
        yield engine, listener


def await_last_block(listener: Listener, prompt: list[int], answer: Answer) -> None:
    """Until a prompt that was new is in host memory with all its blocks. They come there in order."""
    tokens = [*prompt, *answer.tokens[:-1]]
    last = tuple(tokens[len(tokens) // BLOCK * BLOCK - BLOCK : len(tokens) // BLOCK * BLOCK])
    until(
        lambda: sum(told.tokens == last for told in listener.hear().blocks[CPU].values()) == GROUPS,
        "the last block is in host memory",
    )


def test_a_router_knows_what_the_engine_will_hit(running: tuple[Engine, Listener]) -> None:
    engine, listener = running
    prompts, others = make_prompts(6), make_prompts(6, seed=1)
    for prompt in prompts:
        await_last_block(listener, prompt, engine.generate([prompt])[0])
    believed = []
    for prompt, other in zip(reversed(prompts), others, strict=True):
        engine.reset()
        believed.append(min(listener.hear().num_hits(prompt, CPU, groups=GROUPS), (len(prompt) - 1) // BLOCK))
        assert cached_of(engine.generate([prompt], num_tokens=1)) == [believed[-1] * BLOCK]
        await_last_block(listener, other, engine.generate([other])[0])
    assert len(set(believed)) > 1, believed
    router = listener.hear()
    assert router.counts[CPU, "removed"] > 0
    router.compare_with_device(CPU)
    kinds = {place.group: told.of[2:4] for place, told in router.known[CPU].items()}
    assert kinds == {0: ("full_attention", None), 1: ("sliding_window", WINDOW)}


def test_salts_and_adapters_are_told_as_the_device_tells_them(running: tuple[Engine, Listener], tmp_path: Path) -> None:
    engine, listener = running
    (salted,) = make_prompts(1, seed=2)

    def expect_all(prompt: list[int], answer: Answer, adapter: str | None) -> None:
        await_last_block(listener, prompt, answer)
        router = listener.hear()
        for medium, groups in ((CPU, GROUPS), (GPU, 1)):  # what vLLM says of a window on the device, nobody can tell
            hits = router.num_hits(prompt, medium, groups=groups, salt=SALT, adapter=adapter)
            assert hits == len(prompt) // BLOCK
            assert router.num_hits(prompt, medium, groups=groups, salt="salt", adapter=adapter) == 0

    expect_all(salted, engine.generate([salted], salt=SALT)[0], None)
    tiny_llama.make_adapter(tmp_path / "adapter", seed=1)
    seeds, adapted = itertools.count(4), []

    def is_kept() -> bool:
        """Nothing is, of prompts that come before the adapter was hashed."""
        (prompt,) = make_prompts(1, seed=next(seeds))
        adapted[:] = [(prompt, engine.generate([prompt], salt=SALT, adapter=tmp_path / "adapter")[0])]
        return any(told.of[1] == ADAPTER for told in listener.hear().blocks[CPU].values())

    until(is_kept, "a prompt with the adapter is in host memory")
    expect_all(*adapted[0], ADAPTER)
    router = listener.hear()
    router.compare_with_device(CPU)
    assert {told.extra for told in router.known[CPU].values()} == {None, (SALT,), (ADAPTER,), (ADAPTER, SALT)}
    assert {told.of[:2] for told in router.known[CPU].values()} == {(None, None), (1, ADAPTER)}


def test_a_reset_is_told(running: tuple[Engine, Listener]) -> None:
    engine, listener = running
    (prompt,) = make_prompts(1, seed=3)
    await_last_block(listener, prompt, engine.generate([prompt])[0])
    engine.reset()
    engine.generate([prompt[:7]], num_tokens=1)
    # vLLM says that all is cleared, and means the device.
    until(lambda: listener.hear().num_hits(prompt, CPU, groups=GROUPS) == len(prompt) // BLOCK, "it is told again")
    engine.reset(connector=True)
    until(lambda: not listener.hear().places(CPU), "nothing is left in host memory")
