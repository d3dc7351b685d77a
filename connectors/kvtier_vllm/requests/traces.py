"""The trace that a request of vLLM belongs to, and the spans of what the scheduler's side waits for."""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager

from kvtier.identity.keys import BlockKey
from kvtier.offload import Block
from kvtier.system.tracing import NO_CONTEXT, Attribute, Span, tracing


class RequestTrace:
    """The spans of one request, of which one is open at a time. Scheduler thread only."""

    __slots__ = ("_open", "context")

    def __init__(self, headers: Mapping[str, str] | None) -> None:
        """:param headers: what vLLM hands on of the request's HTTP headers; a request without them begins no trace."""
        traceparent = None if not headers else headers.get("traceparent")
        self.context = (tracing.sampled(traceparent) or NO_CONTEXT) if traceparent is not None else NO_CONTEXT
        """`NO_CONTEXT`: the request is not traced."""
        self._open: Span | None = None

    def within(self, stage: str, /, **attributes: Attribute) -> AbstractContextManager[None]:
        """Begins a span, and ends one that is open. What the calling thread starts meanwhile belongs to it."""
        self.end()
        if self.context:
            self._open = tracing.begin(stage, self.context, **attributes)
        return tracing.within(NO_CONTEXT if self._open is None else self._open.context)

    def end(self, **attributes: Attribute) -> None:
        """Ends the open span, if there is one."""
        if self._open is not None:
            self._open.attributes |= attributes
            tracing.end(self._open)
            self._open = None


def by_trace(blocks: list[Block], keys: Iterable[tuple[str, Iterable[BlockKey]]]) -> dict[str, list[Block]]:
    """Blocks to be saved, by the context of their request.

    :param keys: of requests that are traced, by context. Blocks of others are under `NO_CONTEXT`.
    """
    contexts = {key: context for context, of_request in keys for key in of_request}
    if not contexts:
        return {NO_CONTEXT: blocks}
    found: dict[str, list[Block]] = {}
    for block in blocks:
        found.setdefault(contexts.get(block[0], NO_CONTEXT), []).append(block)
    return found
