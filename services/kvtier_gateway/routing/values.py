"""What a strategy is told, and what it answers."""

import enum
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NewType

EngineId = NewType("EngineId", str)
"""Names an engine for as long as it lives, e.g. its address."""
RequestId = Hashable
"""Names a request between `Strategy.sent` and its end. The caller's choice; no two requests under way share one."""
Key = int
"""The last 64 bits of a block's chain hash, as KV events of engines tell them."""


class Reads(enum.Enum):
    """What of a prompt a strategy looks at, so that the caller makes nothing else."""

    NOTHING = "nothing"
    TEXT = "text"
    KEYS = "keys"


class Medium(enum.Enum):
    """The memory in which an engine holds a block, as KV events call it. What is on its disk counts as not there."""

    DEVICE = "GPU"
    HOST = "CPU"


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is known of a request before it is sent. What nobody knows is None."""

    num_tokens: int | None = None
    """Exact where the prompt was tokenised, else an estimate, e.g. a quarter of the characters."""
    text: str | None = None
    """The prompt's text, system prompt first, as engines would put it together."""
    tokens: Sequence[int] | None = None
    keys: Sequence[Key] | None = None
    """One for each full block of tokens, first to last."""
    tokens_per_block: int = 0
    """How many tokens each of `keys` stands for."""
    num_in_pool: int | None = None
    """How many of the leading `keys` the pool holds: the caller has asked it. None: there is no pool, or it is dead."""
    adapter: str = ""
    session: str | None = None
    """The value of the header that names a session."""
    tenant: str = ""


class Load(NamedTuple):
    """How busy an engine is."""

    running: int = 0
    """Requests sent by this gateway that have had their first token and have not ended: always up to date."""
    waiting: int = 0
    """Requests sent by this gateway that have had no token yet: always up to date."""
    backlog_tokens: int | None = None
    """Prompt tokens that the engine has still to compute, as it last told; None: it does not tell."""
    kv_use: float = 0.0
    """Share of the device's KV memory that running requests hold, 0 to 1, as it last told."""

    @property
    def requests(self) -> int:
        """Requests under way."""
        return self.running + self.waiting


@dataclass(frozen=True, slots=True)
class Prices:
    """What an engine's work costs in time, as its metrics say. The defaults are of an 8 B model on an H200."""

    token_s: float = 27e-6
    """Seconds to compute a prompt token without its attention."""
    token_context_s: float = 1.15e-9
    """Seconds more for each token that comes before it."""
    request_s: float = 5e-3
    """Seconds that a request costs whatever its length."""
    kv_bytes_per_token: int = 131_072
    host_bytes_per_s: float = 52e9
    """Bandwidth from the engine's host memory to its device."""
    pool_bytes_per_s: float = 0.0
    """Bandwidth from the pool to the device, as measured of late; 0: there is no pool, and its price is infinite."""

    def compute_s(self, first: int, end: int) -> float:
        """Seconds to compute the tokens `first` to `end` of a prompt after those before them."""
        return (end - first) * (self.token_s + self.token_context_s * 0.5 * (first + end))


DEFAULT_PRICES = Prices()


class Candidate(NamedTuple):
    """An engine that may be chosen: it is healthy, and not draining."""

    engine: EngineId
    load: Load = Load()
    prices: Prices = DEFAULT_PRICES


@dataclass(frozen=True, slots=True)
class Choice:
    """The answer of a strategy."""

    engine: EngineId
    reason: str
    """A few words from a small set, for logs and as the label of a counter, e.g. `prefix`."""
    predicted_s: float | None = None
    """Expected time to first token, where the strategy predicts one."""
    alternative_s: float | None = None
    """The lowest that it expected of any other engine; None where it does not predict, or there is no other."""


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks of one chain came to a medium of an engine."""

    keys: Sequence[Key]
    medium: Medium


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks left a medium of an engine."""

    keys: Sequence[Key]
    medium: Medium


@dataclass(frozen=True, slots=True)
class BlocksCleared:
    """An engine has no blocks any more, or nobody knows which."""


KvEvent = BlocksStored | BlocksRemoved | BlocksCleared
