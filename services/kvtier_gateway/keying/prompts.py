"""What a strategy is told of a request's prompt."""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvtier.identity.keys import BlockHasher, BlockKey
from kvtier.system.started_threads import started_threads
from kvtier_gateway.engines.engine import Engine, KeyForm
from kvtier_gateway.keying.pool import PoolLookup
from kvtier_gateway.keying.tenants import ChainMemory, TenantHashers, short_keys
from kvtier_gateway.keying.tokenising import PromptTokens, Tokens
from kvtier_gateway.routing.values import Key, Prompt, Reads

_CHARACTERS_PER_TOKEN = 4
_THREADS = 2
_CHAINS_BYTES = 64 << 20
_SHORT = 8192
"""Bytes of a request, or token ids, that are tokenised and hashed at once: some 2 ms where they are all new."""


def _nothing(keys: Sequence[Key]) -> None:
    """Nothing is to be done."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a client asks for."""

    fields: Mapping[str, Any]
    """The request as clients send it, for either route."""
    num_bytes: int
    """The length of its body."""
    tenant: str
    session: str | None = None


@dataclass(frozen=True, slots=True)
class _Keyed:
    tokens: Tokens
    keys: list[BlockKey]


class Prompts:
    """Reads prompts. Event loop only; what takes long is done in threads."""

    def __init__(self, tokens: PromptTokens | None, hashers: TenantHashers, pool: PoolLookup) -> None:
        """:param tokens: None: nothing is tokenised, so there are no keys."""
        self._tokens, self._hashers, self._pool = tokens, hashers, pool
        self._chains = ChainMemory(_CHAINS_BYTES)
        self._threads = started_threads(_THREADS, "kvtier-keys")

    async def read(
        self,
        asked: Asked,
        reads: Reads,
        engines: Collection[Engine],
        meanwhile: Callable[[Sequence[Key]], None] = _nothing,
    ) -> Prompt:
        """What can be said of a request.

        :param reads: what the strategy looks at; nothing else is made.
        :param engines: those that may get it; keys are those of most of them.
        :param meanwhile: gets the keys where there are any, while the pool answers.
        """
        model, tenant, session = asked.fields.get("model"), asked.tenant, asked.session
        adapter = model if isinstance(model, str) else ""
        if reads is Reads.NOTHING:
            return Prompt(adapter=adapter, session=session, tenant=tenant)
        if reads is Reads.KEYS and not any(adapter in engine.adapters for engine in engines):
            form = _form_of_most(engines)
            keyed = await self._keyed(asked, form)
            if keyed is not None and form is not None:
                in_pool = self._pool.num_leading(tenant, keyed.keys, form.namespaces)
                keys = short_keys(keyed.keys)
                meanwhile(keys)
                return Prompt(
                    num_tokens=len(keyed.tokens),
                    tokens=keyed.tokens,  # type: ignore[arg-type] # an array is a sequence in all that is asked of it
                    keys=keys,
                    tokens_per_block=form.tokens_per_block,
                    num_in_pool=await in_pool,
                    adapter=adapter,
                    session=session,
                    tenant=tenant,
                )
        text = "".join(_texts(asked.fields))
        num_tokens = len(text) // _CHARACTERS_PER_TOKEN
        return Prompt(num_tokens=num_tokens, text=text, adapter=adapter, session=session, tenant=tenant)

    def close(self) -> None:
        """Waits for what is under way."""
        self._threads.shutdown(cancel_futures=True)

    async def _keyed(self, asked: Asked, form: KeyForm | None) -> _Keyed | None:
        hasher = None if form is None else self._hashers.of(asked.tenant, form.tokens_per_block)
        if self._tokens is None or hasher is None:
            return None
        look = partial(self._look, self._tokens, hasher, asked.fields)
        return look() if _is_short(asked) else await asyncio.get_running_loop().run_in_executor(self._threads, look)

    def _look(self, prompts: PromptTokens, hasher: BlockHasher, fields: Mapping[str, Any]) -> _Keyed | None:
        """Any thread."""
        tokens = prompts.of_request(fields)
        return None if tokens is None else _Keyed(tokens, self._chains.keys_of(hasher, tokens))


def _is_short(asked: Asked) -> bool:
    """Whether a prompt costs less than to have a thread look at it.

    All of a conversation counts, since a template may write any of it: roles, and calls of tools.
    """
    prompt = asked.fields.get("prompt")
    if isinstance(prompt, list):  # token ids, or what is not tokenised
        return len(prompt) <= _SHORT
    if prompt is None and asked.fields.get("tools"):  # which are not tokenised either
        return True
    return asked.num_bytes <= _SHORT


def _form_of_most(engines: Collection[Engine]) -> KeyForm | None:
    """How most engines make keys that say so; of several that are equal, the first one's."""
    forms = [engine.key_form for engine in engines if engine.key_form is not None]
    if not forms or forms.count(forms[0]) == len(forms):  # as nearly always: to compare is faster than to hash
        return forms[0] if forms else None
    counts = Counter(forms)
    return max(counts, key=counts.__getitem__)


def _texts(fields: Mapping[str, Any]) -> Iterator[str]:
    """The prompt's text, from its beginning."""
    prompt = fields.get("prompt")
    if isinstance(prompt, str):
        yield prompt
    elif isinstance(prompt, list):  # of texts, or of token ids, which are as good to tell prompts apart
        yield " ".join(map(str, prompt))
    messages = fields.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict):
            yield f"\n{message.get('role')}\n"
            yield from _contents(message.get("content"))


def _contents(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for part in content:
            text = part.get("text") if isinstance(part, dict) else None
            yield text if isinstance(text, str) else str(part)
