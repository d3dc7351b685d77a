"""What a vLLM engine with kvtier was asked, and the KV events that it has published: `golden/vllm_kv_events.jsonl`.

Lines are either a batch, `{"batch": HEX}`, or a request with what vLLM said of it afterwards. The engine hears of the
next request when all that the one before has left behind was published. `tests/vllm/record_kv_events.py` records it.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

RECORDING = Path(__file__).parents[1] / "golden" / "vllm_kv_events.jsonl"
TENANTS = ("red", "blue")
TOKENS_PER_BLOCK = 32
_VOCABULARY = 2000


@dataclass(frozen=True, slots=True)
class Asked:
    """One request."""

    tenant: str
    seed: int
    length: int
    """In tokens."""
    salt: str | None = None
    """The client's own `cache_salt`."""
    adapter: bool = False
    num_cached: int = 0
    """Tokens of the prompt that vLLM found on its device or in host memory."""

    @property
    def prompt(self) -> list[int]:
        """The prompt's tokens. One that is longer goes on where a shorter one of the same seed ends."""
        return [(7 * i * i + 3 * i + 101 * self.seed) % _VOCABULARY + 3 for i in range(self.length)]


def write(lines: Iterable[Asked | bytes]) -> None:
    """Writes a recording."""
    dicts = ({"batch": line.hex()} if isinstance(line, bytes) else asdict(line) for line in lines)
    RECORDING.write_text("".join(json.dumps(each) + "\n" for each in dicts))


def read() -> list[Asked | bytes]:
    """The recording: requests and batches in the order in which they came."""
    lines = [json.loads(line) for line in RECORDING.read_text().splitlines()]
    return [bytes.fromhex(line["batch"]) if "batch" in line else Asked(**line) for line in lines]
