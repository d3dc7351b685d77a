"""Records `golden/vllm_kv_events.jsonl` anew: `.venv/vllm/bin/python tests/vllm/record_kv_events.py`."""

import os
import sys
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "rigs"))

import tiny_llama
import zmq
from engine_lab import Engine, Lab
from vllm.distributed.kv_events import ZmqEventPublisher
from vllm_rig import settings, transfer

from cache_pool import WAIT_S, until
from recorded_vllm import RECORDING, TENANTS, Asked, write

REQUESTS = [
    Asked("red", 0, 200),
    Asked("blue", 0, 200),
    Asked("red", 0, 300),  # goes on
    Asked("red", 1, 150, salt="pepper"),
    Asked("red", 1, 150),
    Asked("blue", 2, 170, adapter=True),
    Asked("blue", 2, 170),
    *(Asked("red", seed, 250) for seed in range(3, 9)),  # the first ones leave the device, and then host memory
    Asked("red", 8, 250),
    Asked("red", 5, 250),
    Asked("blue", 0, 200),
    Asked("red", 0, 300),
]
NUM_DEVICE_BLOCKS = 24


class Listener:
    """Asks for all that was published."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.RCVTIMEO, int(1000 * WAIT_S))
        self._socket.connect(address)
        self._next = 0

    def hear(self) -> list[bytes]:
        """What came since the last call."""
        self._socket.send_multipart([b"", self._next.to_bytes(8, "big")])
        heard = []
        while True:
            _, _, number, batch = self._socket.recv_multipart()
            if number == ZmqEventPublisher.END_SEQ:
                return heard
            self._next += 1
            heard.append(batch)

    def close(self) -> None:
        self._context.destroy(linger=0)


def ask(engine: Engine, asked: Asked, adapter: Path) -> Asked:
    """With what vLLM found."""
    (answer,) = engine.generate(
        [asked.prompt],
        num_tokens=40,
        salt=asked.salt,
        adapter=adapter if asked.adapter else None,
        params={"kvtier": {"tenant": asked.tenant}},
    )
    until(engine.is_idle, "all is saved")
    engine.generate([[5] * 7], num_tokens=2, params={"kvtier": {"tenant": asked.tenant}})  # steps, which publish
    until(engine.is_idle, "all is saved")
    return replace(asked, num_cached=answer.num_cached)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        tiny_llama.make(home / "model", seed=0)
        tiny_llama.make_adapter(home / "adapter", seed=1)
        address = f"ipc://{folder}/replay"
        events = {"enable_kv_cache_events": True, "endpoint": f"ipc://{folder}/events", "replay_endpoint": address}
        connector = transfer(settings(None, gateway=TENANTS, host={"capacity_bytes": "3MiB"}))
        options = {"num_gpu_blocks_override": NUM_DEVICE_BLOCKS, "enable_lora": True, "max_lora_rank": 8}
        with (
            closing(Lab(home, home / "model")) as lab,
            lab.engine(connector, kv_events_config=events, max_model_len=512, **options) as engine,
            closing(Listener(address)) as listener,
        ):
            lines: list[Asked | bytes] = []
            for asked in REQUESTS:
                lines += [ask(engine, asked, home / "adapter"), *listener.hear()]
            engine.reset(connector=True)
            engine.generate([[5] * 7], num_tokens=2, params={"kvtier": {"tenant": "red"}})  # publishes that
            lines += listener.hear()
            lines += [ask(engine, REQUESTS[-1], home / "adapter"), *listener.hear()]
        write(lines)
        print(f"{RECORDING}: {os.path.getsize(RECORDING):,} bytes")
        for line in lines:
            print(line if isinstance(line, Asked) else f"  {len(line)} bytes")


if __name__ == "__main__":
    main()
