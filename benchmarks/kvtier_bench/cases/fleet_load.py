"""A scaled-down load of several turns, as a trace for the simulator and as requests for real engines."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import aiohttp
from pydantic_core import from_json

from kvtier.errors import KvtierError
from kvtier.traces.form import Request, Trace

TOKENS_PER_BLOCK = 16
ANSWER_TOKENS = 4
_FIRST_TOKEN, _NUM_TOKENS = 100, 40_000
"""The ids of tokens that prompts are made of: no special ones."""
_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Shape:
    """Conversations about documents of their own."""

    sessions: int = 10
    turns: int = 5
    document_blocks: int = 28
    """The blocks of each first prompt, of 16 tokens each."""
    turn_blocks: int = 3
    """What each turn adds, the answer before included."""

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all prompts together."""
        of_session = sum(self.document_blocks + turn * self.turn_blocks for turn in range(1, self.turns + 1))
        return self.sessions * of_session * TOKENS_PER_BLOCK


def trace_of(shape: Shape, duration_s: float, seed: int) -> Trace:
    """Prompts arrive at random, as many a second at the end as at the beginning, and those of a session in order.

    :param seed: chooses order, times and content: traces of different seeds have no block in common.
    """
    chance = Random(seed)
    turns = [session for session in range(shape.sessions) for _ in range(shape.turns)]
    chance.shuffle(turns)
    times_s = sorted(chance.uniform(0, duration_s) for _ in turns)
    times_s = [time_s - times_s[0] for time_s in times_s]
    asked, requests = [0] * shape.sessions, []
    for time_s, session in zip(times_s, turns, strict=True):
        asked[session] += 1
        num_blocks = shape.document_blocks + asked[session] * shape.turn_blocks
        first = (seed * shape.sessions + session) << 16
        keys = range(first, first + num_blocks)
        requests.append(Request(time_s, keys, num_blocks * TOKENS_PER_BLOCK, num_answer_tokens=ANSWER_TOKENS))
    return Trace("conversations", requests, shape.sessions << 16, TOKENS_PER_BLOCK)


def tokens_of(request: Request) -> list[int]:
    """The prompt whose blocks these are."""
    found: list[int] = []
    for key in request.keys:
        source = Random(key)
        found += [_FIRST_TOKEN + source.randrange(_NUM_TOKENS) for _ in range(TOKENS_PER_BLOCK)]
    return found


@dataclass(frozen=True, slots=True)
class Answered:
    """What became of one request."""

    ttft_s: float
    """Seconds from when it was due to the first event of its answer."""
    step_s: float
    """Seconds from one token to the next, where the answer has several."""
    num_cached: int
    """Tokens of the prompt that were not computed."""


def replay(url: str, key: str, requests: Sequence[Request]) -> list[Answered]:
    """Sends each request when it is due, whatever has become of those before."""
    return asyncio.run(_replay(url, key, requests))


async def _replay(url: str, key: str, requests: Sequence[Request]) -> list[Answered]:
    prompts = [tokens_of(request) for request in requests]
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=_TIMEOUT_S)
    headers = {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
        begun_s = time.monotonic() + 0.1

        async def ask(request: Request, prompt: list[int]) -> Answered:
            due_s = begun_s + request.time_s
            await asyncio.sleep(due_s - time.monotonic())
            return await _answered(session, url, prompt, due_s)

        return list(await asyncio.gather(*(map(ask, requests, prompts))))


async def _answered(session: aiohttp.ClientSession, url: str, prompt: list[int], due_s: float) -> Answered:
    body = {"prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    first_s = last_s = 0.0
    num_cached = None
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise KvtierError(f"{url} answers {response.status}: {(await response.read())[:500]!r}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = from_json(line.removeprefix(b"data: "))
            if "error" in event:
                raise KvtierError(f"{url} answers: {event['error']}")
            last_s = time.monotonic() if event["choices"] else last_s
            first_s = first_s or last_s
            if event.get("usage"):
                num_cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
    if num_cached is None or not first_s:
        raise KvtierError(f"{url} has not answered to the end")
    return Answered(first_s - due_s, (last_s - first_s) / max(1, ANSWER_TOKENS - 1), num_cached)
