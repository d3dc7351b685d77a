"""`hash_trie`: the longest known prefix in chunks of 128 characters (`prefixaware` of vLLM's production-stack)."""

import random
from collections.abc import Iterator, Sequence

import xxhash

from kvtier_gateway.routing.engine_bits import EngineBits, each_bit
from kvtier_gateway.routing.key_masks import KeyMasks
from kvtier_gateway.routing.strategy import Strategy
from kvtier_gateway.routing.values import Candidate, Choice, EngineId, Prompt, Reads, RequestId

CHUNK_CHARACTERS = 128
MAX_CHUNKS = 1_000_000


class HashTrie(Strategy):
    """Sends a prompt to one of the engines that were sent its longest known prefix, whatever their load.

    A node of the trie is the hash of a chunk and of all before it. A prompt without a match goes to any engine, at
    random, because every engine has the empty prefix.
    """

    reads = Reads.TEXT

    def __init__(self, seed: int = 0, max_chunks: int = MAX_CHUNKS) -> None:
        self._random, self._bits, self._sent = random.Random(seed), EngineBits(), KeyMasks(max_chunks)

    def __len__(self) -> int:
        """Returns the number of remembered chunks."""
        return len(self._sent)

    def choose(self, prompt: Prompt, candidates: Sequence[Candidate], now_s: float) -> Choice:
        """Returns one of the engines with the longest match, at random."""
        engines = {self._bits.bit(candidate.engine): candidate.engine for candidate in candidates}
        matched, reason = sum(engines), "no prefix"
        for chunk in _chunks(prompt):
            if not matched & self._sent.get(chunk):
                break
            matched, reason = matched & self._sent.get(chunk), "prefix"
        return Choice(engines[self._random.choice(list(each_bit(matched)))], reason)

    def sent(self, request: RequestId, prompt: Prompt, choice: Choice, now_s: float) -> None:
        """Remembers the prompt's chunks; the last first, so that ends of prompts are forgotten first."""
        bit = self._bits.bit(choice.engine)
        self._sent.add(reversed(list(_chunks(prompt))), bit)

    def engine_left(self, engine: EngineId) -> None:
        """Forgets what the engine was sent."""
        self._bits.retire(engine)
        if self._bits.are_sparse:
            self._sent.renumber(self._bits.renumber())


def _chunks(prompt: Prompt) -> Iterator[int]:
    text = prompt.text or ""
    state = xxhash.xxh64(f"{prompt.tenant}\0{prompt.adapter}".encode())
    for start in range(0, len(text), CHUNK_CHARACTERS):
        state.update(text[start : start + CHUNK_CHARACTERS].encode(errors="surrogatepass"))
        yield state.intdigest()
