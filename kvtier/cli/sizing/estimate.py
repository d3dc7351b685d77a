"""What conversations take in each tier, and which links and drives are faster than computing again."""

from dataclasses import dataclass

_OVERHEAD_PER_BLOCK = 768
"""Bytes that a pool charges for a block beside its payload."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a site wants to keep."""

    bytes_per_token: int
    tokens_per_block: int
    conversation_tokens: int
    """Tokens of one conversation, prompt and answers together."""
    conversations: int
    """Conversations that are to be found again."""
    active_conversations: int
    """The conversations that go on within minutes, and should come from memory."""
    window_bytes: int = 0
    """What layers with a sliding window keep of a conversation, however long it is."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a `Demand` comes to."""

    block_bytes: int
    conversation_bytes: int
    memory_bytes: int
    """Memory for the active conversations, with what a pool adds to each block."""
    disk_bytes: int
    """Disk for all conversations."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way on which a conversation may come back."""

    name: str
    bytes_per_s: float
    fetch_s: float
    """Seconds for one conversation's KV."""
    gain: float | None
    """Seconds of computing over seconds of fetching. None: the speed of computing is not known."""


WAYS = (
    ("network 1 Gbit/s", 0.11e9),
    ("network 10 Gbit/s", 1.1e9),
    ("network 25 Gbit/s", 2.8e9),
    ("network 100 Gbit/s", 11e9),
    ("SATA SSD", 0.5e9),
    ("NVMe drive", 3e9),
    ("shared memory, one core", 8e9),
)
"""Names and usable bytes per second: nine tenths of what is written on links, reads of common drives."""


def estimate(demand: Demand) -> Estimate:
    """Returns bytes for `demand`. Only full blocks are kept."""
    block_bytes = demand.bytes_per_token * demand.tokens_per_block
    blocks = demand.conversation_tokens // demand.tokens_per_block
    conversation_bytes = blocks * block_bytes + demand.window_bytes
    return Estimate(
        block_bytes=block_bytes,
        conversation_bytes=conversation_bytes,
        memory_bytes=demand.active_conversations * (conversation_bytes + blocks * _OVERHEAD_PER_BLOCK),
        disk_bytes=demand.conversations * conversation_bytes,
    )


def break_even_bytes_per_s(bytes_per_token: int, prefill_tokens_per_s: float) -> float:
    """Returns the bandwidth below which computing a token is faster than fetching its KV."""
    return bytes_per_token * prefill_tokens_per_s


def ways(conversation_bytes: int, conversation_tokens: int, prefill_tokens_per_s: float | None) -> list[Way]:
    """Returns `WAYS` for a conversation of that size, with the gain where the speed of computing is known."""
    compute_s = None if prefill_tokens_per_s is None else conversation_tokens / prefill_tokens_per_s
    found = []
    for name, bytes_per_s in WAYS:
        fetch_s = conversation_bytes / bytes_per_s
        found.append(Way(name, bytes_per_s, fetch_s, None if compute_s is None else compute_s / fetch_s))
    return found
