"""`simhash`: prompts that resemble each other go to one engine (Charikar 2002; near as in Manku et al. 2007)."""

import random
from collections import deque
from collections.abc import Sequence

import numpy as np
import xxhash

from kvtier_gateway.routing.least_loaded import least_loaded
from kvtier_gateway.routing.strategy import Strategy
from kvtier_gateway.routing.values import Candidate, Choice, EngineId, Prompt, Reads, RequestId

BITS = 64
NEAR_BITS = 3
HEAD_CHARACTERS = 2048
SHINGLE_CHARACTERS = 8
REMEMBERED = 4096


class SimHash(Strategy):
    """Compares fingerprints of prompts' heads with those sent last, and follows the nearest within 3 bits of 64.

    What is near need not share a prefix: prompts that differ in their first word alone look alike, and share no block.
    """

    reads = Reads.TEXT

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._sent: deque[tuple[int, EngineId]] = deque(maxlen=REMEMBERED)

    def choose(self, prompt: Prompt, candidates: Sequence[Candidate], now_s: float) -> Choice:
        """Returns the engine of the nearest prompt; the least loaded one where none is near."""
        present, mark = {candidate.engine for candidate in candidates}, fingerprint(prompt)
        known = [((other ^ mark).bit_count(), engine) for other, engine in self._sent if engine in present]
        distance, nearest = min(known, default=(BITS, None))
        if nearest is not None and distance <= NEAR_BITS:
            return Choice(nearest, "near")
        return Choice(least_loaded(candidates, self._random).engine, "load")

    def sent(self, request: RequestId, prompt: Prompt, choice: Choice, now_s: float) -> None:
        """Remembers the fingerprint."""
        self._sent.append((fingerprint(prompt), choice.engine))

    def engine_left(self, engine: EngineId) -> None:
        """Forgets what the engine was sent."""
        self._sent = deque((entry for entry in self._sent if entry[1] != engine), maxlen=REMEMBERED)


def fingerprint(prompt: Prompt) -> int:
    """Returns 64 bits, of which few differ where few shingles of the heads differ, within one tenant and adapter."""
    head = (prompt.text or "")[:HEAD_CHARACTERS].encode(errors="surrogatepass")
    starts = range(0, max(1, len(head) - SHINGLE_CHARACTERS + 1), SHINGLE_CHARACTERS // 2)
    shingles = [xxhash.xxh64_intdigest(head[i : i + SHINGLE_CHARACTERS]) for i in starts]
    places = np.arange(BITS, dtype=np.uint64)
    votes = (np.array(shingles, np.uint64)[:, None] >> places) & np.uint64(1)
    ones = votes.sum(axis=0) * 2 > len(shingles)
    apart = xxhash.xxh64_intdigest(f"{prompt.tenant}\0{prompt.adapter}".encode())
    return int((ones.astype(np.uint64) << places).sum()) ^ apart
